"""Times and rates: in order, inside their bounds, and consistent with their own parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from finalbench.metrics import CellRow, Rate, is_valid, within_bounds
from finalbench.plan import Cell
from finalbench.record import RequestRecord
from finalbench.validity.violation import Violation, violation

IDENTITY_TOLERANCE = 1e-9


def check_clocks(
    cell: Cell, row: CellRow, requests: Sequence[RequestRecord]
) -> Iterator[Violation]:
    for request in requests:
        yield from _order(cell, request)
    yield from _in_flight(cell, requests)
    yield from _rates(row)
    yield from _bounds(row)


def _order(cell: Cell, request: RequestRecord) -> Iterator[Violation]:
    times = [at for at, _ in request.chunks]
    edges = [request.scheduled_ns, request.sent_ns, *times, request.done_ns]
    known = [at for at in edges if at is not None]
    if known != sorted(known):
        early, late = next((a, b) for a, b in pairwise(known) if b < a)
        yield violation(
            "time_order",
            f"request {request.request_id}: {_name(request, late)} is {early - late} ns before "
            f"{_name(request, early)}",
            cell_id=cell.id,
            block=request.block,
            before_ns=early,
            after_ns=late,
        )
        return
    if len(times) > 1 and times[0] == times[-1] and is_valid(request):
        yield violation(
            "time_order",
            f"request {request.request_id}: {len(times)} content events in 0 ns",
            cell_id=cell.id,
            block=request.block,
            events=len(times),
            span_ns=0,
        )


def _name(request: RequestRecord, at: int) -> str:
    """What happened at that time; for messages."""
    if at == request.done_ns:
        return "done"
    for index, (when, _) in enumerate(request.chunks):
        if when == at:
            return f"chunk {index}"
    return "sent" if at == request.sent_ns else "scheduled"


def _in_flight(cell: Cell, requests: Sequence[RequestRecord]) -> Iterator[Violation]:
    """A stream is in flight from its send to its last content event."""
    by_server: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for request in requests:
        if request.chunks:
            # An end and a start at the same instant do not overlap: -1 sorts before +1.
            by_server.setdefault((request.block, request.server_id), []).extend(
                [(request.sent_ns, 1), (request.chunks[-1][0], -1)]
            )
    for (block, _), events in sorted(by_server.items()):
        most = max(accumulate(change for _, change in sorted(events)))
        if most > cell.concurrency:
            yield violation(
                "in_flight",
                f"{most} streams were in flight at once, the cell allows {cell.concurrency}",
                cell_id=cell.id,
                block=block,
                in_flight=most,
                concurrency=cell.concurrency,
            )


def _rates(row: CellRow) -> Iterator[Violation]:
    named: list[tuple[str, int | None, Rate]] = [(n, None, r) for n, r in row.rates.items()]
    for block in row.blocks:
        named += [
            ("decode_tok_s", block.block, block.decode),
            ("e2e_tok_s", block.block, block.e2e),
            ("steady_tok_s", block.block, block.steady),
        ]
    for name, at, rate in named:
        if rate.value is None:
            continue
        if rate.tokens is None or rate.seconds is None:
            yield violation("rate_identity", f"{name} has no parts", cell_id=row.id, block=at)
            continue
        credited = rate.value * rate.seconds
        if abs(credited - rate.tokens) > IDENTITY_TOLERANCE * rate.tokens:
            yield violation(
                "rate_identity",
                f"{name} x duration is {credited:.6g} tokens, the numerator is {rate.tokens}",
                cell_id=row.id,
                block=at,
                rate=rate.value,
                seconds=rate.seconds,
                tokens=rate.tokens,
            )
    peak, mean = row.peak_tok_s, row.e2e_tok_s
    if peak is not None and mean is not None and peak < mean * (1 - IDENTITY_TOLERANCE):
        yield violation(
            "peak_below_mean",
            f"peak {peak:.6g} tok/s is below the mean of {mean:.6g}",
            cell_id=row.id,
            peak=peak,
            mean=mean,
        )


def _bounds(row: CellRow) -> Iterator[Violation]:
    values: list[tuple[str, str, float | None]] = [(n, n, r.value) for n, r in row.rates.items()]
    for name, found in row.latencies.items():
        values += [
            (name, f"{name}.{part}", getattr(found, part))
            for part in ("mean", "p50", "p90", "p95", "p99", "p99_9")
        ]
    values += [
        (name, name, getattr(row, name))
        for name in (
            "tpot_token_weighted_s",
            "acceptance_length",
            "goodput_share",
            "limit_tok_s",
            "cache_hit_share",
        )
    ]
    values.append(("acceptance_rate", "acceptance_rate", row.acceptance.rate))
    for metric_id, shown, value in values:
        if value is not None and not within_bounds(metric_id, value):
            yield violation(
                "out_of_range",
                f"{shown} is {value:.6g}: not a possible measurement",
                cell_id=row.id,
                value=value,
            )
