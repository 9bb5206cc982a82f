"""Token rates over the requests of one cell. Each keeps its numerator, denominator and window."""

from __future__ import annotations

from collections.abc import Sequence

from finalbench.metrics.timing import NS, Timing, known
from finalbench.scenario import Frozen

MIN_STEADY_WINDOW_S = 1.0
BUCKET_NS = 1_000_000_000


class Rate(Frozen):
    """`value` = `tokens` / `seconds`, or null with a reason.

    `start_ns` and `end_ns` bound the events used; `seconds` may be less than their distance when a
    rate adds the spans of separate requests or blocks.
    """

    value: float | None
    tokens: int | None = None
    seconds: float | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    token_source: str | None = None
    requests: int = 0
    reason: str | None = None


def missing(reason: str) -> Rate:
    return Rate(value=None, reason=reason)


def decode_rate(timings: Sequence[Timing], concurrency: int) -> Rate:
    """Single-stream decode rate; the first chunk's tokens and the wait for it are left out."""
    if concurrency != 1:
        return missing("decode_tok_s is defined for one stream only")
    used = [t for t in timings if t.valid]
    if not used:
        return missing("no valid request")
    if any(t.first_tokens is None for t in used):
        return missing("tokens of the first chunk are unknown")
    used = [t for t in used if (t.decode_tokens or 0) > 0]
    if not used:
        return missing("no request has a token after its first chunk")
    return _rate(
        used,
        tokens=sum(known(t.decode_tokens for t in used)),
        ns=sum(known(t.decode_ns for t in used)),
        start=min(known(t.first_ns for t in used)),
        end=max(known(t.last_ns for t in used)),
    )


def e2e_rate(timings: Sequence[Timing]) -> Rate:
    """Tokens of valid requests from the first scheduled send, of any request, to the last event.

    Failed requests earn no tokens, but the time they took stays in the denominator.
    """
    used = [t for t in timings if t.valid]
    if not used:
        return missing("no valid request")
    start = min(t.scheduled_ns for t in timings)
    end = max(known(t.last_ns for t in timings))
    tokens = sum(known(t.tokens for t in used))
    return _rate(used, tokens=tokens, ns=end - start, start=start, end=end)


def steady_rate(timings: Sequence[Timing], concurrency: int) -> Rate:
    """Tokens inside the steady window of a closed loop. Events are assigned, not requests."""
    if concurrency < 2:
        return missing("steady_tok_s is defined for more than one stream")
    window = steady_window(timings, concurrency)
    if window is None:
        return missing("the streams were never all in flight")
    start, end = window
    if (end - start) * NS < MIN_STEADY_WINDOW_S:
        return missing(
            f"the steady window of {max(end - start, 0) * NS:.3f} s is shorter than "
            f"{MIN_STEADY_WINDOW_S:g} s"
        )
    inside = [t for t in timings if t.last_ns is not None and t.last_ns > start]
    if not all(t.counted_events for t in inside):
        return missing("tokens per chunk are unknown")
    tokens = sum(n for t in inside for at, n in t.weighed if start < at <= end)
    return _rate(inside, tokens=tokens, ns=end - start, start=start, end=end)


def steady_window(timings: Sequence[Timing], concurrency: int) -> tuple[int, int] | None:
    """From the last first token of the opening streams to the first end without a successor."""
    started = [t for t in timings if t.events]
    if len(started) < concurrency:
        return None
    by_send = sorted(started, key=lambda t: (t.sent_ns, t.request_id))
    opening = by_send[:concurrency]
    start = max(known(t.first_ns for t in opening))
    last_send = by_send[-1].sent_ns
    # An end at the instant of the last send is that of the stream that sent.
    ends = [end for end in known(t.last_ns for t in started) if end > last_send]
    return (start, min(ends)) if ends else None


def peak_rate(timings: Sequence[Timing]) -> Rate:
    """Best bucket, weighing each chunk by its tokens.

    The span from the first to the last content event is cut into equal buckets of at least 1 s, so
    that their tokens add up to the total and the best is never below the mean.
    """
    used = [t for t in timings if t.valid]
    if not used:
        return missing("no valid request")
    if not all(t.counted_events for t in used):
        return missing("tokens per chunk are unknown")
    start = min(known(t.first_ns for t in used))
    end = max(known(t.last_ns for t in used))
    if end - start < BUCKET_NS:
        return missing("the events span less than one bucket of 1 s")
    counts = buckets(used, start, end)
    best = max(range(len(counts)), key=lambda i: counts[i])
    ns = (end - start) / len(counts)
    return Rate(
        value=counts[best] / (ns * NS),
        tokens=counts[best],
        seconds=ns * NS,
        start_ns=start + round(best * ns),
        end_ns=start + round((best + 1) * ns),
        token_source=sources(used),
        requests=len(used),
    )


def buckets(timings: Sequence[Timing], start_ns: int, end_ns: int) -> list[int]:
    """Tokens in equal parts of the span, each of 1 s or a little more."""
    span = end_ns - start_ns
    counts = [0] * (span // BUCKET_NS)
    for one in timings:
        for at, tokens in one.weighed:
            index = min((at - start_ns) * len(counts) // span, len(counts) - 1)
            counts[index] += tokens
    return counts


def pooled(rates: Sequence[Rate]) -> Rate:
    """Blocks added: sum of tokens / sum of seconds, so that rate x duration = tokens holds."""
    used = [r for r in rates if r.value is not None]
    if not used:
        return missing((rates[0].reason if rates else None) or "no block was measured")
    tokens = sum(known(r.tokens for r in used))
    seconds = sum(known(r.seconds for r in used))
    found = {r.token_source for r in used}
    return Rate(
        value=tokens / seconds,
        tokens=tokens,
        seconds=seconds,
        start_ns=min(known(r.start_ns for r in used)),
        end_ns=max(known(r.end_ns for r in used)),
        token_source=found.pop() if len(found) == 1 else "mixed",
        requests=sum(r.requests for r in used),
    )


def sources(timings: Sequence[Timing]) -> str | None:
    found = set(known(t.source for t in timings))
    if not found:
        return None
    return found.pop() if len(found) == 1 else "mixed"


def _rate(used: Sequence[Timing], *, tokens: int, ns: int, start: int, end: int) -> Rate:
    if ns <= 0:
        return missing(f"the time span is {ns} ns")
    return Rate(
        value=tokens / (ns * NS),
        tokens=tokens,
        seconds=ns * NS,
        start_ns=start,
        end_ns=end,
        token_source=sources(used),
        requests=len(used),
    )
