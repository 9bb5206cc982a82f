"""The scoring arm's view of each engine token, teacher-forced, outside every timed window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx2

from finalbench.arms import arm
from finalbench.record import Plan, RequestRecord, ScorePosition, ScoreRecord
from finalbench.runtime.asking import asking
from finalbench.runtime.ready import ServerFailed
from finalbench.runtime.server import LiveServer

TOP = 2  # the argmax and its nearest rival


def scorer_key(plan: Plan, baseline: str | None) -> str | None:
    """The baseline's server where it can score, else any that can."""
    able = [c for c in plan.cells if arm(c.arm).scores]
    able.sort(key=lambda c: c.arm != baseline)
    return able[0].server_key if able else None


class Scorer:
    """Scores outputs on one live server; equal (prompt, output) pairs are asked for once."""

    def __init__(self, server: LiveServer, server_id: str, arm: str, *, timeout_s: float) -> None:
        self._server, self._server_id, self._arm = server, server_id, arm
        self._known: dict[tuple[str, tuple[int, ...]], tuple[ScorePosition, ...]] = {}
        self._client = asking(server.base_url, timeout_s=timeout_s)

    def close(self) -> None:
        self._client.close()

    def score(self, request: RequestRecord, prompt: Sequence[int]) -> ScoreRecord:
        """Judge one request's output. Errors: `ServerFailed` in words."""
        key = (request.prompt_digest, request.token_ids)
        if key not in self._known:
            self._known[key] = self._ask(prompt, request.token_ids)
        positions = self._known[key]
        logits = all(p.logit is not None for p in positions)
        return ScoreRecord(
            request_id=request.request_id,
            cell_id=request.cell_id,
            block=request.block,
            arm=request.arm,
            scorer_arm=self._arm,
            scorer_server_id=self._server_id,
            unit="logit" if logits else "logprob",
            positions=positions,
        )

    def _ask(self, prompt: Sequence[int], output: Sequence[int]) -> tuple[ScorePosition, ...]:
        body = {
            "model": self._server.model_id,
            "prompt": [*prompt, *output],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": TOP,
            "prompt_logits": True,
        }
        try:
            answer = self._client.post("/v1/completions", json=body)
        except httpx2.HTTPError as error:
            raise ServerFailed(f"scoring: {type(error).__name__} {error}") from error
        if answer.status_code != 200:
            raise ServerFailed(f"scoring: HTTP {answer.status_code}: {answer.text[:300]}")
        try:
            entries = answer.json()["choices"][0]["prompt_logprobs"][len(prompt) :]
            return tuple(
                _position(token, entry) for token, entry in zip(output, entries, strict=True)
            )
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ServerFailed(f"scoring: the answer is not as agreed ({error!r})") from error


def _position(token: int, entry: dict[str, dict[str, Any]]) -> ScorePosition:
    own = entry[str(token)]
    unit = "logit" if all("logit" in e for e in entry.values()) else "logprob"
    best = sorted(entry.items(), key=lambda item: (item[1]["rank"], int(item[0])))[:TOP]
    return ScorePosition(
        token=token,
        logit=own.get("logit"),
        logprob=own["logprob"],
        rank=own["rank"],
        top=tuple((int(name), value[unit]) for name, value in best),
    )
