"""A drafter for tests: proposes a known continuation, right for as long as it is told to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Oracle:
    """``truth``: the tokens the request will emit. ``plan(round)``: (k, how many of them right)."""

    truth: list[int]
    plan: Callable[[int], tuple[int, int]]
    vocab: int
    rounds: int = 0

    def propose(self, emitted: int, k: int) -> list[int]:
        """Drafts after ``emitted`` tokens: the first ``right`` true, the next one wrong."""
        count, right = self.plan(self.rounds)
        self.rounds += 1
        count = min(count, k)
        drafts = list(self.truth[emitted : emitted + count])
        drafts += [0] * (count - len(drafts))
        if right < count:
            drafts[right] = (drafts[right] + 1) % self.vocab
        return drafts
