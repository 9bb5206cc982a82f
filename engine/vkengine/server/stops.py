"""Stop strings over text that arrives in pieces of any size."""

from __future__ import annotations


class StopStrings:
    """Holds back text that could be the start of a stop string.

    The match that ends first wins, then the one that starts first, so the result depends on the
    text alone and never on how it was cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Text that is safe to show. After a match, `matched` is set and nothing may follow."""
        if not self._stops or not piece:
            return piece
        text = self._held + piece
        found = [(start + len(s), start, s) for s in self._stops if (start := text.find(s)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that starts `stop`, short of all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - size :]):
            return size
    return 0
