"""A request inside the engine: its tokens, its position, its counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .draft.auto import AutoK
from .draft.ngram import NgramIndex
from .draft.oracle import Oracle
from .output import RequestStats, TokenLogprobs
from .sampler import Sampler
from .sampling import MAX_K, Draft, SamplingParams


@dataclass(slots=True)
class Sequence:
    """``position``: tokens whose state is held, which is also the next row's position.

    During prefill ``position < len(prompt)``; afterwards the last emitted token is at
    ``position`` and not yet in the state.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    draft: Draft
    sampler: Sampler
    slot: int
    limit: int  # positions available
    stop_ids: frozenset[int]
    position: int = 0
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    stats: RequestStats = field(default_factory=lambda: RequestStats(0, 0))
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    carried: Tensor | None = None  # hidden state [1, H] of the last prompt position seen so far
    auto: AutoK | None = None
    ngram: NgramIndex | None = None
    oracle: Oracle | None = None
    finish: str | None = None
    stop_reason: int | None = None

    @property
    def prefilling(self) -> bool:
        return self.position < len(self.prompt)

    def next_k(self) -> int:
        """How many drafts to ask for now."""
        if not self.draft.active:
            return 0
        k = self.auto.choose() if self.auto is not None else int(self.draft.k)
        return max(0, min(k, MAX_K, self.limit - self.position - 2))

    def count(self, proposed: int, accepted: int) -> None:
        """Account one verify round."""
        if not self.draft.active:
            return
        stats = self.stats
        stats.drafts += 1
        stats.draft_tokens += proposed
        stats.accepted_tokens += accepted
        while len(stats.accepted_per_pos) < proposed:
            stats.accepted_per_pos.append(0)
        for i in range(accepted):
            stats.accepted_per_pos[i] += 1
        if self.auto is not None:
            self.auto.observe(proposed, accepted)

    def take(self, tokens: list[int]) -> list[int]:
        """Append emitted tokens up to a stop or the length limit; returns those kept."""
        params = self.params
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            self.output.append(token)
            if token in self.stop_ids:
                self.finish = "stop"
                self.stop_reason = token if token in params.stop_token_ids else None
                break
            if len(self.output) >= params.max_tokens or (
                len(self.prompt) + len(self.output) >= self.limit
            ):
                self.finish = "length"
                break
        return kept
