"""Tokens of one request, step by step, with the draft accounting of a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from finalbench.testing.toy_model import EOS, Sampler, decode, extend_state, prefix_state, unit
from finalbench.testing.toy_protocol import ChatBody, CompletionBody
from finalbench.testing.toy_state import PER_POSITION, ToyState

_AUTO_K = 3


@dataclass(slots=True)
class SpecStats:
    """Per request. Drafts are verify rounds, counted before truncation at the end."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_pos: list[int] = field(default_factory=lambda: [0] * PER_POSITION)


class Generation:
    """One choice of one request. `rounds()` may be consumed once."""

    def __init__(
        self, state: ToyState, prompt: list[int], body: CompletionBody | ChatBody, number: int
    ) -> None:
        behaviour = state.behaviour
        self.state = state
        self.prompt = prompt
        self.number = number
        self.seed = body.seed if body.seed is not None else number
        self.stop_ids = set(body.stop_token_ids)
        limit = getattr(body, "max_completion_tokens", None) or body.max_tokens or 16
        if behaviour.ignores("max_tokens"):
            limit *= 2
        if behaviour.context_limit >= 0:
            limit = min(limit, behaviour.context_limit)
        self.limit = limit
        self.sampler = Sampler(
            temperature=1.0 if behaviour.ignores("temperature") else body.temperature,
            top_k=behaviour.default_top_k if body.top_k is None else body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            seed=self.seed,
        )
        self.k, self.accept = self._draft_plan(body)
        self.spec = SpecStats()
        self.tokens: list[int] = []
        self.finish_reason: str | None = None

    def _draft_plan(self, body: CompletionBody | ChatBody) -> tuple[int, float]:
        draft, behaviour = body.draft, self.state.behaviour
        if draft is None or draft.method == "none" or behaviour.ignores("draft"):
            return 0, 0.0
        k = _AUTO_K if draft.k == "auto" else draft.k
        accept = behaviour.accept
        if draft.acceptance is not None:
            accept = draft.acceptance.get("synthetic", accept)
        return k, accept

    def step_seconds(self) -> float:
        base = self.state.step_seconds(self.k, self.number)
        if not self.state.behaviour.jitter:
            return base
        share = unit(self.number, len(self.tokens), 17) * 2.0 - 1.0
        return base * (1.0 + self.state.behaviour.jitter * share)

    def rounds(self) -> Iterator[list[int]]:
        """Tokens of each step; the first step is the prefill's."""
        sizes = self.state.behaviour.chunk_sizes()
        crc, step = prefix_state(self.prompt), 0
        while self.finish_reason is None:
            size = sizes[step % len(sizes)]
            if self.k:
                size = 1 if step == 0 else self._verify_round(crc)
            new: list[int] = []
            while len(new) < size and self.finish_reason is None:
                token = self._next(crc)
                crc = extend_state(crc, token)
                new.append(token)
                self.tokens.append(token)
                self._check_end(token)
            step += 1
            yield new

    def _verify_round(self, crc: int) -> int:
        accepted = 0
        while accepted < self.k and unit(crc, accepted, 99) < self.accept:
            self.spec.per_pos[accepted] += 1
            accepted += 1
        self.spec.drafts += 1
        self.spec.draft_tokens += self.k
        self.spec.accepted += accepted
        return 1 + accepted

    def _next(self, crc: int) -> int:
        behaviour, pseudo, at = self.state.behaviour, self.state.pseudo, len(self.tokens)
        if behaviour.eos_after >= 0 and at >= behaviour.eos_after - 1:
            return EOS
        wrong = behaviour.wrong_token == at and self.number >= behaviour.wrong_from_request
        if wrong or (self.k and behaviour.draft_diverges == at):
            return pseudo.candidates(crc)[2][0]
        if behaviour.flip_ties and self.state.drafts_allowed and behaviour.tie_every:
            best, second = pseudo.candidates(crc)[:2]
            if best[1] - second[1] < 0.001 and self.sampler.temperature == 0.0:
                return second[0]
        return pseudo.choose(crc, len(self.prompt) + at, self.sampler)

    def _check_end(self, token: int) -> None:
        if (token == EOS and not self.state.behaviour.pad_after_eos) or token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"

    def text(self) -> str:
        return decode([token for token in self.tokens if token != EOS])

    def usage(self, completion: int, prompt_shown: int) -> dict[str, object]:
        behaviour = self.state.behaviour
        usage: dict[str, object] = {
            "prompt_tokens": prompt_shown,
            "completion_tokens": completion,
            "total_tokens": prompt_shown + completion,
        }
        if behaviour.reasoning_usage:
            reasoning = behaviour.reasoning_tokens
            shown = completion if reasoning < 0 else min(reasoning, completion)
            usage["completion_tokens_details"] = {"reasoning_tokens": shown}
        return usage

    def final_usage(self) -> dict[str, object]:
        """Usage as the last event reports it, faults included."""
        behaviour, completion = self.state.behaviour, len(self.tokens)
        if behaviour.usage == "wrong":
            completion = 1
        elif unit(self.number, 3) < behaviour.usage_wrong_share:
            completion -= 1
        extra = behaviour.prompt_tokens_extra if self.number >= behaviour.inflate_from else 0
        return self.usage(completion, len(self.prompt) + extra)

    def metrics(self) -> dict[str, object] | None:
        """The `metrics` object of the last chunk; None when the behaviour leaves it out."""
        spec, mode = self.spec, self.state.behaviour.counters
        if mode == "absent":
            return None
        shown = {
            "num_drafts": spec.drafts,
            "num_draft_tokens": spec.draft_tokens,
            "num_accepted_tokens": spec.accepted,
            "num_accepted_tokens_per_pos": spec.per_pos[: self.k],
        }
        if mode == "fake":
            shown["num_drafts"] = max(1, spec.drafts // 2)
            shown["num_accepted_tokens"] = spec.draft_tokens + 5
        return {"speculative_decoding": shown, "seed": self.seed}

    def settle(self) -> None:
        """Adds the request to the server's totals, once, when its last token is out."""
        totals = self.state.counters
        totals.plain["prompt_tokens"] += len(self.prompt)
        totals.plain["generation_tokens"] += len(self.tokens)
        totals.plain["request_success"] += 1
        totals.drafts += self.spec.drafts
        totals.draft_tokens += self.spec.draft_tokens
        totals.accepted += self.spec.accepted
        for position, value in enumerate(self.spec.per_pos):
            totals.accepted_per_pos[position] += value
