"""The engine: requests in, tokens out, one round of all running sequences per step."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .config import ModelConfig
from .draft.auto import AutoK
from .draft.mtp import MtpDrafter
from .draft.ngram import NgramIndex
from .draft.oracle import Oracle
from .engine_report import add_up, merged, settings_of
from .models.qwen3_5 import logits_of
from .output import EngineFull, Output, RequestStats
from .prefill import UNIT, Span, prefill_unit
from .sampler import Sampler, logprobs_of, make_processors
from .sampling import Draft, SamplingParams
from .sequence import Sequence
from .step import Lane, Model, run_round

__all__ = ["Engine", "EngineFull", "load_engine"]

#: Prefill units per step: alone, and beside running sequences (whose next token waits for them).
UNITS_ALONE = 16
UNITS_BESIDE = 2
#: Time of one more draft over a round without drafts, for ``k: auto`` (measured on vk-tiny).
DRAFT_COST = 0.25


class Engine:
    """Serves up to ``max_sequences`` requests at once. Not thread safe."""

    def __init__(
        self,
        model: Model,
        *,
        profile: str,
        weights: str,
        default_draft: Draft,
        drafter: MtpDrafter | None,
        threads: int | None = None,
    ) -> None:
        config = model.weights.config
        self.model = model
        self.config: ModelConfig = config
        self.profile = profile
        self.weights = weights
        self.model_name = config.name
        self.max_model_len = model.state.max_len
        self.max_sequences = model.state.max_sequences
        self.vocab_size = config.vocab_size
        self.eos_token_ids = frozenset(config.eos_token_ids)
        self.default_draft = default_draft
        self.drafter = drafter
        self.oracles: dict[str, Oracle] = {}
        # Rows were proven independent at this number of threads, so a later change is undone.
        self._threads = threads if threads is not None else torch.get_num_threads()
        self._free = list(range(self.max_sequences - 1, -1, -1))
        self._running: dict[str, Sequence] = {}
        self._done: list[Output] = []
        self._totals = RequestStats(0, 0)
        self._full = 0

    @torch.inference_mode()
    def add(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Admit a request. Raises ValueError naming the field, EngineFull when no slot is free."""
        draft = params.draft or self.default_draft
        self._check(request_id, prompt_token_ids, params, draft)
        if not self._free:
            self._full += 1
            raise EngineFull(f"all {self.max_sequences} sequences are running")
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.eos_token_ids
        seed = secrets.randbits(63) if params.seed is None else params.seed
        banned = sorted(stop_ids | self.eos_token_ids)
        processors = make_processors(params, prompt_token_ids, banned, self.vocab_size)
        slot = self._free.pop()
        self.model.state.reset(slot)
        sequence = Sequence(
            request_id=request_id,
            prompt=list(prompt_token_ids),
            params=params,
            draft=draft,
            sampler=Sampler(params, processors, seed, self.vocab_size),
            slot=slot,
            limit=self.max_model_len,
            stop_ids=stop_ids,
        )
        sequence.stats = RequestStats(len(prompt_token_ids), 0, seed=seed)
        if params.prompt_logprobs is not None:
            sequence.prompt_logprobs = [None]
        if draft.active:
            if draft.k == "auto":
                sequence.auto = AutoK(DRAFT_COST)
            if draft.method == "ngram":
                sequence.ngram = NgramIndex()
                sequence.ngram.extend(prompt_token_ids)
            elif draft.method == "oracle":
                sequence.oracle = self.oracles.pop(request_id)
        self._running[request_id] = sequence

    def _check(
        self, request_id: str, prompt: list[int], params: SamplingParams, draft: Draft
    ) -> None:
        if request_id in self._running:
            raise ValueError(f"request_id: {request_id!r} is running already")
        if not prompt:
            raise ValueError("prompt_token_ids: must not be empty")
        ids = [*prompt, *params.stop_token_ids, *(params.logit_bias or {})]
        names = ["prompt_token_ids"] * len(prompt)
        names += ["stop_token_ids"] * len(params.stop_token_ids)
        names += ["logit_bias"] * len(params.logit_bias or {})
        for name, token in zip(names, ids, strict=True):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"{name}: id {token} is outside the vocabulary")
        if len(prompt) + 1 > self.max_model_len:
            raise ValueError(
                f"prompt_token_ids: {len(prompt)} tokens leave no room in the context of "
                f"{self.max_model_len}"
            )
        if draft.active and draft.method == "mtp" and self.drafter is None:
            missing = self.model.weights.missing_mtp
            which = f" (tensor {missing[0]} is missing)" if missing else ""
            raise ValueError(f"draft.method: this model has no MTP module{which}")
        if draft.active and draft.method == "oracle" and request_id not in self.oracles:
            raise ValueError("draft.method: oracle is for tests; no oracle was registered")

    def abort(self, request_id: str) -> None:
        """Drop a request and free its slot now; unknown ids are ignored. No output follows."""
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._release(sequence)

    def has_work(self) -> bool:
        return bool(self._running)

    def progress(self, request_id: str) -> RequestStats | None:
        """A running request's figures up to the last step; None once it is gone."""
        if (s := self._running.get(request_id)) is None:
            return None
        per_pos = list(s.stats.accepted_per_pos)
        return replace(s.stats, completion_tokens=len(s.output), accepted_per_pos=per_pos)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Prefill what waits, then one round for every sequence that decodes."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        self._done = []
        running = list(self._running.values())
        decoding = [s for s in running if not s.prefilling]
        units = UNITS_BESIDE if decoding else UNITS_ALONE
        for sequence in running:
            while sequence.prefilling and sequence.finish is None and units > 0:
                self._prefill(sequence)
                units -= 1
        if decoding:
            self._decode(decoding)
        return self._done

    def _prefill(self, s: Sequence) -> None:
        start = s.position
        span = Span(s.slot, start, min(UNIT, len(s.prompt) - start))
        tokens = torch.tensor(s.prompt[start : span.end])
        h = prefill_unit(self.model.weights, self.model.state, tokens, span, self.model.ws)
        score = s.prompt_logprobs is not None
        last = span.end == len(s.prompt)
        if not (score or last or s.draft.active):
            s.position = span.end
            return
        mtp = s.draft.active and s.draft.method == "mtp"
        # Whole units go through the head in one shape, a lone last row in another, always alike.
        hidden, logits = logits_of(h if score or mtp else h[-1:], self.model.weights)
        if score:
            self._score(s, start, logits)
        if mtp:
            self._prefill_mtp(s, start, hidden, last)
        s.position = span.end
        if last:
            if score or mtp:
                hidden, logits = logits_of(h[-1:], self.model.weights)
            if not bool(torch.isfinite(h.sum())):
                self._fail(s)
                return
            token = s.sampler.choose(logits, s.position, [])
            self._emit(s, token, logits, hidden)

    def _score(self, s: Sequence, start: int, logits: Tensor) -> None:
        """Log-probabilities of prompt tokens start+1.. from the rows of one unit."""
        assert s.prompt_logprobs is not None and s.params.prompt_logprobs is not None
        following = s.prompt[start + 1 : start + 1 + logits.shape[0]]
        s.prompt_logprobs += logprobs_of(
            logits[: len(following)], following, s.params.prompt_logprobs
        )

    def _prefill_mtp(self, s: Sequence, start: int, hidden: Tensor, last: bool) -> None:
        """Positions whose next token is known; the last prompt position waits for it."""
        assert self.drafter is not None
        count = hidden.shape[0] - (1 if last else 0)
        if count:
            following = torch.tensor(s.prompt[start + 1 : start + 1 + count])
            self.drafter.prefill(s.slot, start, hidden[:count], following)

    def _decode(self, sequences: list[Sequence]) -> None:
        lanes = [
            Lane(s.slot, s.position, s.output[-1], s.sampler, s.drafts, s.draft.acceptance)
            for s in sequences
        ]
        verdicts = run_round(self.model, lanes)
        for s, verdict in zip(sequences, verdicts, strict=True):
            if not verdict.finite:
                self._fail(s)
                continue
            s.count(len(s.drafts), verdict.accepted)
            s.position += verdict.accepted + 1
            self._emit(s, verdict.tokens, verdict.logits, verdict.hidden)

    def _emit(self, s: Sequence, tokens: list[int], logits: Tensor, hidden: Tensor) -> None:
        """Record tokens that follow rows 0.. of logits and hidden, then draft or finish."""
        kept = s.take(tokens)
        s.sampler.commit(kept, s.position + 1)
        logprobs = None
        if s.params.logprobs is not None:
            logprobs = logprobs_of(logits[: len(kept)], kept, s.params.logprobs)
        output = Output(s.request_id, kept, logprobs)
        if s.prompt_logprobs is not None:
            output.prompt_logprobs, s.prompt_logprobs = s.prompt_logprobs, None
        self._done.append(output)
        if s.ngram is not None:
            s.ngram.extend(kept)
        if s.finish is None:
            s.drafts = self._draft(s, tokens, hidden)
            return
        output.finish_reason, output.stop_reason = s.finish, s.stop_reason
        self._close(s, output)

    def _draft(self, s: Sequence, tokens: list[int], hidden: Tensor) -> list[int]:
        k = s.next_k()
        if s.draft.method == "mtp" and s.draft.active:
            assert self.drafter is not None
            first = s.position - len(tokens)
            if k == 0:
                following = torch.tensor(tokens)
                self.drafter.prefill(s.slot, first, hidden[: len(tokens)], following)
                return []
            rows = hidden[: len(tokens)]
            return self.drafter.propose(
                s.slot, first, rows, tokens, k, s.sampler, s.draft.head_rows
            )
        if k and s.ngram is not None:
            return s.ngram.propose(k)
        if k and s.oracle is not None:
            return s.oracle.propose(len(s.output), k)
        return []

    def _fail(self, s: Sequence) -> None:
        message = "the model produced values that are not finite"
        output = Output(s.request_id, [], finish_reason="error", error=message)
        self._done.append(output)
        self._close(s, output)

    def _close(self, s: Sequence, output: Output) -> None:
        s.stats.completion_tokens = len(s.output)
        output.stats = s.stats
        self._release(s)

    def _release(self, s: Sequence) -> None:
        del self._running[s.request_id]
        self._free.append(s.slot)
        self._totals = merged(self._totals, s.stats)

    def settings(self) -> dict[str, Any]:
        """Effective settings for ``/v1/settings`` (the server adds digest, nonce, versions)."""
        return settings_of(self)

    def counters(self) -> dict[str, float | list[float]]:
        """Totals since start; running requests included."""
        running = [s.stats for s in list(self._running.values())]
        counters = add_up([self._totals, *running])
        counters["engine_full"] = float(self._full)
        counters["kv_cache_usage_perc"] = 1.0 - len(self._free) / self.max_sequences
        return counters

    def close(self) -> None:
        """Drop all requests and memory."""
        for sequence in list(self._running.values()):
            self._release(sequence)


def load_engine(*args: Any, **kwargs: Any) -> Engine:
    """See :func:`vkengine.load.load_engine`."""
    from .load import load_engine as load

    return load(*args, **kwargs)
