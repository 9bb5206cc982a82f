"""The Engine API without a model: tokens are a fixed function of prompt, seed and position."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vkengine.output import EngineFull, Output, RequestStats, TokenLogprobs
from vkengine.sampling import SamplingParams

EOS = 0


@dataclass
class FakeRequest:
    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)


@dataclass
class FakeEngine:
    """`script` replaces the made-up tokens; `per_step` of them come at once."""

    vocab_size: int = 320
    max_model_len: int = 512
    max_sequences: int = 4
    per_step: int = 1
    step_s: float = 0.0
    script: list[int] | None = None
    fail_after: int | None = None  # steps until step() raises
    refuse: Callable[[SamplingParams], str | None] = lambda _params: None
    full_at: int | None = None  # sequences at which add raises EngineFull
    profile: str = "vkae"
    model_name: str = "fake"
    eos_token_ids: frozenset[int] = frozenset({EOS})
    closed: bool = False
    steps: int = 0
    most_running: int = 0
    requests: dict[str, FakeRequest] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    admitted: list[list[int]] = field(default_factory=list)

    def add(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        if problem := self.refuse(params):
            raise ValueError(problem)
        if len(self.requests) >= (self.full_at or self.max_sequences):
            raise EngineFull
        assert request_id not in self.requests
        self.requests[request_id] = FakeRequest(prompt_token_ids, params)
        self.admitted.append(prompt_token_ids)
        self.most_running = max(self.most_running, len(self.requests))

    def abort(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def has_work(self) -> bool:
        return bool(self.requests)

    def progress(self, request_id: str) -> RequestStats | None:
        request = self.requests[request_id]
        return RequestStats(len(request.prompt), len(request.tokens))

    def token(self, request: FakeRequest) -> int:
        position = len(request.tokens)
        if self.script is not None:
            return self.script[position % len(self.script)]
        key = repr((request.prompt, request.params.seed, request.params.choice, position))
        return 1 + zlib.crc32(key.encode()) % (self.vocab_size - 1)

    def step(self) -> list[Output]:
        self.steps += 1
        if self.fail_after is not None and self.steps > self.fail_after:
            raise RuntimeError("planted fault in /srv/secret/engine.py")
        if self.step_s:
            time.sleep(self.step_s)
        outputs = []
        for request_id, request in list(self.requests.items()):
            output = self._advance(request_id, request)
            if output.finish_reason is not None:
                del self.requests[request_id]
            outputs.append(output)
        return outputs

    def _advance(self, request_id: str, request: FakeRequest) -> Output:
        params, first = request.params, not request.tokens
        output = Output(request_id, [])
        while len(output.token_ids) < self.per_step and output.finish_reason is None:
            token_id = self.token(request)
            request.tokens.append(token_id)
            output.token_ids.append(token_id)
            count = len(request.tokens)
            if count >= params.min_tokens:
                if token_id in params.stop_token_ids:
                    output.finish_reason, output.stop_reason = "stop", token_id
                elif token_id in self.eos_token_ids and not params.ignore_eos:
                    output.finish_reason = "stop"
            if output.finish_reason is None and count == params.max_tokens:
                output.finish_reason = "length"
        if params.logprobs is not None:
            output.logprobs = [_entry(t, params.logprobs) for t in output.token_ids]
        if first and params.prompt_logprobs is not None:
            scored = [_entry(t, params.prompt_logprobs) for t in request.prompt[1:]]
            output.prompt_logprobs = [None, *scored]
        if output.finish_reason is not None:
            count = len(request.tokens)
            output.stats = RequestStats(
                len(request.prompt), count, 5, 15, 9, [4, 3, 2], seed=params.seed or 0
            )
        return output

    def settings(self) -> dict[str, Any]:
        return {"schema_version": 1, "profile": self.profile, "model": self.model_name}

    def counters(self) -> dict[str, float | list[float]]:
        return {
            "spec_decode_num_drafts": 5.0,
            "spec_decode_num_draft_tokens": 15.0,
            "spec_decode_num_accepted_tokens": 9.0,
            "spec_decode_num_accepted_tokens_per_pos": [4.0, 3.0, 2.0],
            "kv_cache_usage_perc": 0.25,
        }

    def close(self) -> None:
        self.closed = True


def _entry(token_id: int, top: int) -> TokenLogprobs:
    best = [(i, -0.5 - i) for i in range(top)]
    return TokenLogprobs(token_id, -1.5, best, rank=7, logsumexp=2.0)
