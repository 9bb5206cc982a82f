"""One request's events reduced to what rates and latencies need.

Tokens are counted from ids, else usage, never from chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from finalbench.record import RequestRecord

NS = 1e-9
NORMAL_FINISHES = frozenset({"stop", "length"})

TokenSource = Literal["ids", "usage"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timing:
    """Times in ns on the harness clock; `fault` says why the request earns no credit.

    `events` are (time, tokens) of the content chunks. Token counts per event are None when only a
    total is known and the chunks are fewer than the tokens.
    """

    request_id: str
    fault: str | None
    source: TokenSource | None
    tokens: int | None
    first_tokens: int | None
    scheduled_ns: int
    sent_ns: int
    connect_ns: int | None
    first_ns: int | None
    last_ns: int | None
    events: tuple[tuple[int, int | None], ...]

    @property
    def valid(self) -> bool:
        return self.fault is None

    @property
    def counted_events(self) -> bool:
        return bool(self.events) and all(n is not None for _, n in self.events)

    @property
    def weighed(self) -> list[tuple[int, int]]:
        """The events whose tokens are known."""
        return [(at, n) for at, n in self.events if n is not None]

    @property
    def decode_tokens(self) -> int | None:
        """Tokens after the first content chunk."""
        if self.tokens is None or self.first_tokens is None:
            return None
        return self.tokens - self.first_tokens

    @property
    def decode_ns(self) -> int | None:
        return self.events[-1][0] - self.events[0][0] if self.events else None

    def gaps(self) -> Iterator[tuple[int, int | None]]:
        """(gap in ns, tokens of the event that ends it)."""
        for (before, _), (after, tokens) in pairwise(self.events):
            yield after - before, tokens


def known(values: Iterable[T | None]) -> list[T]:
    """Those that are not None."""
    return [value for value in values if value is not None]


def timing(request: RequestRecord) -> Timing:
    """Reduce one record. Content events are the chunks that carry tokens."""
    source, tokens = count_tokens(request)
    events = _events(request, source, tokens)
    return Timing(
        request_id=request.request_id,
        fault=fault(request, tokens),
        source=source,
        tokens=tokens,
        first_tokens=events[0][1] if events else None,
        scheduled_ns=request.scheduled_ns,
        sent_ns=request.sent_ns,
        connect_ns=request.connect_ns,
        first_ns=events[0][0] if events else None,
        last_ns=events[-1][0] if events else None,
        events=events,
    )


def is_valid(request: RequestRecord) -> bool:
    """Whether the request earns credit, without looking at its events."""
    return fault(request, count_tokens(request)[1]) is None


def count_tokens(request: RequestRecord) -> tuple[TokenSource | None, int | None]:
    if request.token_ids:
        return "ids", len(request.token_ids)
    if request.usage is not None:
        return "usage", request.usage.completion
    return None, None


def fault(request: RequestRecord, tokens: int | None) -> str | None:
    """Why this request does not count, or None. Only a proper end earns credit."""
    if request.status != "ok":
        return f"{request.status}: {request.error or 'no reason given'}"
    if request.error is not None:
        return f"error: {request.error}"
    if not request.done_seen:
        return "the stream has no terminal event"
    if request.finish_reason not in NORMAL_FINISHES:
        return f"finish_reason is {request.finish_reason!r}"
    if tokens is None:
        return "no token count: neither ids nor usage"
    if tokens == 0 or not request.chunks:
        return "no generated token was seen"
    return None


def _events(
    request: RequestRecord, source: TokenSource | None, tokens: int | None
) -> tuple[tuple[int, int | None], ...]:
    chunks = request.chunks
    if source == "ids" or (tokens is not None and sum(n for _, n in chunks) == tokens):
        counted = tuple(c for c in chunks if c[1] > 0)
        if counted:
            return counted
    if tokens is not None and len(chunks) == tokens:
        # As many content chunks as tokens: each holds exactly one.
        return tuple((t, 1) for t, _ in chunks)
    return tuple((t, None) for t, _ in chunks)
