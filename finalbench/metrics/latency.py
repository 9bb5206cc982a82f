"""Latencies of valid requests, from the send and from the schedule, and what meets the limits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from finalbench.metrics.distribution import Distribution, distribution
from finalbench.metrics.timing import NS, Timing
from finalbench.scenario import Limits


def latency_table(timings: Sequence[Timing]) -> dict[str, Distribution]:
    """By metric id. Latency ends at the last content event; usage and [DONE] come later."""
    valid = [t for t in timings if t.valid]
    counted = all(t.counted_events for t in valid)
    chunk_gaps, token_gaps, weights = array("d"), array("d"), array("q")
    for one in valid:
        for ns, n in one.gaps():
            chunk_gaps.append(ns * NS)
            if counted and n:
                token_gaps.append(ns * NS / n)
                weights.append(n)
    begun = [(t, t.first_ns) for t in valid if t.first_ns is not None]
    ended = [(t, t.last_ns) for t in valid if t.last_ns is not None]
    return {
        "ttft_s": distribution([(at - t.sent_ns) * NS for t, at in begun]),
        "ttft_scheduled_s": distribution([(at - t.scheduled_ns) * NS for t, at in begun]),
        "tpot_s": distribution([value for t in valid if (value := tpot_s(t)) is not None]),
        "chunk_gap_s": distribution(chunk_gaps, reason="no second chunk"),
        "token_gap_s": distribution(
            token_gaps,
            weights,
            reason="no second chunk" if counted else "tokens per chunk are unknown",
        ),
        "e2e_s": distribution([(at - t.sent_ns) * NS for t, at in ended]),
        "e2e_scheduled_s": distribution([(at - t.scheduled_ns) * NS for t, at in ended]),
        "connect_s": distribution(
            [t.connect_ns * NS for t in valid if t.connect_ns is not None],
            reason="no connection was opened",
        ),
    }


def tpot_s(one: Timing) -> float | None:
    """Seconds per token after the first chunk; None where there is no such token."""
    parts = _decode_parts(one)
    return None if parts is None else parts[0] * NS / parts[1]


def token_weighted_tpot(timings: Sequence[Timing]) -> float | None:
    parts = [p for t in timings if t.valid and (p := _decode_parts(t)) is not None]
    return sum(ns for ns, _ in parts) * NS / sum(n for _, n in parts) if parts else None


def _decode_parts(one: Timing) -> tuple[int, int] | None:
    """(ns, tokens) after the first chunk, where there is such a token."""
    tokens, ns = one.decode_tokens, one.decode_ns
    return (ns, tokens) if tokens and ns is not None else None


def goodput(
    timings: Sequence[Timing], scheduled: int, limits: Limits | None
) -> tuple[float | None, str | None]:
    """Share of scheduled requests, from their scheduled send, that meet every limit."""
    if limits is None:
        return None, "no limits were declared"
    if scheduled == 0:
        return None, "no request was scheduled"
    return sum(_meets(t, limits) for t in timings) / scheduled, None


def _meets(one: Timing, limits: Limits) -> bool:
    if not one.valid or one.first_ns is None or one.last_ns is None:
        return False
    tpot = tpot_s(one)
    pairs = (
        ((one.first_ns - one.scheduled_ns) * NS, limits.ttft_s),
        ((one.last_ns - one.scheduled_ns) * NS, limits.e2e_s),
        (0.0 if tpot is None else tpot, limits.tpot_s),
    )
    return all(limit is None or value <= limit for value, limit in pairs)
