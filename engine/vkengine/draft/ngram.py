"""Prompt lookup: propose what followed the last occurrence of the present n-gram."""

from __future__ import annotations

from dataclasses import dataclass, field

LONGEST = 4
SHORTEST = 2


@dataclass(slots=True)
class NgramIndex:
    """All n-grams of one sequence, newest occurrence wins. Positions are token indices."""

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> index after it
    _indexed: int = 0

    def extend(self, tokens: list[int]) -> None:
        self.tokens.extend(tokens)

    def propose(self, k: int) -> list[int]:
        """Up to k tokens that followed the longest suffix seen before; empty when none was."""
        tokens, size = self.tokens, len(self.tokens)
        # An n-gram is indexed once something follows it, so a suffix never finds itself.
        for end in range(self._indexed, size):
            for n in range(SHORTEST, LONGEST + 1):
                if end >= n:
                    self.ends[tuple(tokens[end - n : end])] = end
        self._indexed = size
        for n in range(LONGEST, SHORTEST - 1, -1):
            if size < n:
                continue
            after = self.ends.get(tuple(tokens[size - n :]))
            if after is not None:
                return self._follow(after, k)
        return []

    def _follow(self, start: int, k: int) -> list[int]:
        """k tokens from ``start``, reading on into the proposal itself when the end is reached."""
        found: list[int] = []
        for i in range(start, start + k):
            found.append(self.tokens[i] if i < len(self.tokens) else found[i - len(self.tokens)])
        return found
