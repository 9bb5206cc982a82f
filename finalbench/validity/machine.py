"""What else could have made the number: a client at its limit, or clocks that differ by arm."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from finalbench.plan import Cell
from finalbench.record import ClientCeiling, RequestRecord, Run, ServerRecord, TelemetryRecord
from finalbench.validity.violation import Violation, violation

NS = 1e-9
CLIENT_HEADROOM = 3.0
MAX_CLIENT_LATE_MS = 10.0
CLOCK = "gpu_sm_clock_mhz"
MIN_CLOCK_SAMPLES = 30
MAX_CLOCK_SPREAD = 0.05
MAX_CLOCK_OFFSET = 0.01


def check_client(
    cell: Cell, requests: Sequence[RequestRecord], ceilings: Sequence[ClientCeiling]
) -> Iterator[Violation]:
    """The client must be able to read several times the chunks that this cell sent."""
    rate = chunks_per_s(cell, requests)
    if rate is None:
        return
    own = [c for c in ceilings if c.streams == cell.concurrency]
    if not own or own[0].chunks_per_s is None:
        reason = own[0].reason if own and own[0].reason else "it was not measured"
        yield violation("client_unmeasured", f"ceiling of the client: {reason}", cell_id=cell.id)
        return
    most, late = own[0].chunks_per_s, own[0].added_p99_ms
    if rate * CLIENT_HEADROOM > most:
        yield violation(
            "client_bound",
            f"the client reads at most {most:.0f} chunks/s, less than {CLIENT_HEADROOM:g} times "
            f"the cell's {rate:.0f}",
            cell_id=cell.id,
            ceiling_chunks_s=most,
            chunks_s=rate,
        )
    if late is not None and late > MAX_CLIENT_LATE_MS:
        yield violation(
            "client_late",
            f"under load the client's time stamps are up to {late:.1f} ms late",
            cell_id=cell.id,
            added_p99_ms=late,
        )


def chunks_per_s(cell: Cell, requests: Sequence[RequestRecord]) -> float | None:
    """Content chunks per second while streaming; None when no request has two."""
    streams = [[at for at, _ in r.chunks] for r in requests if r.chunks]
    seconds = sum(times[-1] - times[0] for times in streams) * NS
    if seconds <= 0:
        return None
    one_stream = sum(len(times) - 1 for times in streams) / seconds
    return one_stream * cell.concurrency


def check_gpu_clocks(
    run: Run,
    requests: Sequence[RequestRecord],
    servers: Sequence[ServerRecord],
    telemetry: Sequence[TelemetryRecord],
) -> Iterator[Violation]:
    """Only samples taken while an arm streamed count; arms must have run at one clock."""
    if not any(str((s.settings or {}).get("device", "")).startswith("cuda") for s in servers):
        return
    samples = sorted(
        (t.t_ns, value) for t in telemetry if (value := t.values.get(CLOCK)) is not None
    )
    clocks = busy_clocks(requests, samples)
    typical: dict[str, float] = {}
    for arm in run.scenario.arms:
        seen = clocks.get(arm, [])
        if len(seen) < MIN_CLOCK_SAMPLES:
            yield violation(
                "clock_unobserved",
                f"{len(seen)} samples of the GPU clock while {arm} was busy; "
                f"{MIN_CLOCK_SAMPLES} are needed",
                samples=len(seen),
                needed=MIN_CLOCK_SAMPLES,
            )
            continue
        typical[arm] = median(seen)
        spread = (max(seen) - min(seen)) / typical[arm]
        if spread > MAX_CLOCK_SPREAD:
            yield violation(
                "clock_unsteady",
                f"the GPU clock moved by {spread:.1%} while {arm} was busy",
                spread=spread,
                bound=MAX_CLOCK_SPREAD,
            )
    if typical:
        low, high = min(typical.values()), max(typical.values())
        if high / low - 1 > MAX_CLOCK_OFFSET:
            text = ", ".join(f"{arm} {clock:.0f} MHz" for arm, clock in typical.items())
            yield violation(
                "clock_confounded",
                f"the arms ran at different GPU clocks: {text}",
                low_mhz=low,
                high_mhz=high,
            )


def busy_clocks(
    requests: Sequence[RequestRecord], samples: Sequence[tuple[int, float]]
) -> Mapping[str, list[float]]:
    """Clock samples by arm that fall between a request's send and its last content event."""
    times = [at for at, _ in samples]
    chosen: dict[str, set[int]] = {}
    for request in requests:
        if request.chunks and not request.warmup:
            first = bisect_left(times, request.sent_ns)
            last = bisect_right(times, request.chunks[-1][0])
            chosen.setdefault(request.arm, set()).update(range(first, last))
    return {arm: [samples[i][1] for i in sorted(found)] for arm, found in chosen.items()}
