"""Choosing k online from what was accepted."""

from __future__ import annotations

from dataclasses import dataclass

from vkengine.sampling import MAX_K


@dataclass(slots=True)
class AutoK:
    """An exponential average of the chance that a draft is accepted given the previous one was.

    ``draft_cost``: time of one more draft (its pass and its verify row) over that of a round
    without drafts.
    """

    draft_cost: float
    chance: float = 0.7
    weight: float = 0.1
    cooling: int = 0

    def observe(self, proposed: int, accepted: int) -> None:
        """One round's outcome."""
        for i in range(min(accepted + 1, proposed)):
            self.chance += self.weight * ((i < accepted) - self.chance)

    def choose(self) -> int:
        """The k with the most expected tokens per cost. When that is 0, probes now and then."""
        best, best_rate = 0, 1.0
        tokens = 1.0
        for k in range(1, MAX_K + 1):
            tokens += self.chance**k
            rate = tokens / (1.0 + k * self.draft_cost)
            if rate > best_rate:
                best, best_rate = k, rate
        if best == 0:
            self.cooling += 1
            if self.cooling % 16 == 0:
                return 1
        return best
