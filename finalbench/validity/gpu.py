"""The GPU while each arm was busy: its clock, what held it back, and who else was on it.

Only samples inside measured requests count, from a send to the last content event. A sensor that
looks back counts only where all it looked back at was measured.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

from finalbench.record import RequestRecord, RunRecords, TelemetryRecord
from finalbench.validity.violation import Violation, violation

NS = 1e-9
CLOCK = "gpu_sm_clock_mhz"
MIN_CLOCK_SAMPLES = 30
MAX_CLOCK_SPREAD = 0.05
MAX_CLOCK_OFFSET = 0.01
MIN_BUSY_SHARE = 0.5
# NVML's utilisation is the share of the last whole sample period, up to 1 s long, in which a kernel
# ran: at any moment it tells of a time that began up to two periods before.
BUSY = "gpu_busy_share"
BUSY_SPAN_NS = 2_000_000_000
# NVML's clock event reasons: hardware and software thermal slowdown, power brake.
SLOWDOWN_REASONS = 0x8 | 0x20 | 0x40 | 0x80


def check_gpu(records: RunRecords) -> Iterator[Violation]:
    """Arms on a GPU must have been watched, at one clock, with the GPU to themselves."""
    servers = records.servers
    if not any(str((s.settings or {}).get("device", "")).startswith("cuda") for s in servers):
        return
    typical: dict[str, float] = {}
    for arm in records.run.scenario.arms:
        inside = busy_samples([r for r in records.requests if r.arm == arm], records.telemetry)
        clocks = _values(inside, CLOCK)
        yield from _others(arm, inside)
        yield from _idle(arm, records)
        if len(clocks) < MIN_CLOCK_SAMPLES:
            yield _unobserved(arm, len(clocks), records.telemetry)
            continue
        typical[arm] = median(clocks)
        spread = (max(clocks) - min(clocks)) / typical[arm]
        if spread > MAX_CLOCK_SPREAD:
            yield violation(
                "clock_unsteady",
                f"the GPU clock moved by {spread:.1%} while {arm} was busy",
                spread=spread,
                bound=MAX_CLOCK_SPREAD,
            )
    yield from _offset(typical)


def _offset(typical: Mapping[str, float]) -> Iterator[Violation]:
    if not typical:
        return
    low, high = min(typical.values()), max(typical.values())
    if high / low - 1 > MAX_CLOCK_OFFSET:
        text = ", ".join(f"{arm} {clock:.0f} MHz" for arm, clock in typical.items())
        yield violation(
            "clock_confounded",
            f"the arms ran at different GPU clocks: {text}",
            low_mhz=low,
            high_mhz=high,
        )


def _unobserved(arm: str, seen: int, telemetry: Sequence[TelemetryRecord]) -> Violation:
    reason = next((t.gpu_reason for t in telemetry if t.gpu_reason is not None), None)
    return violation(
        "clock_unobserved",
        f"{seen} samples of the GPU clock while {arm} was busy; {MIN_CLOCK_SAMPLES} are needed"
        + (f" ({reason})" if reason else ""),
        samples=seen,
        needed=MIN_CLOCK_SAMPLES,
    )


def _others(arm: str, inside: Sequence[TelemetryRecord]) -> Iterator[Violation]:
    """Rules that hold where the sensor exists; a missing one is no breach of these."""
    slowed = [r for r in _values(inside, "gpu_clock_reasons") if int(r) & SLOWDOWN_REASONS]
    if slowed:
        yield violation(
            "gpu_throttled",
            f"heat or a power brake held the GPU's clock down in {len(slowed)} of {len(inside)} "
            f"samples of {arm}",
            samples=len(slowed),
            of=len(inside),
        )
    shared = [n for n in _values(inside, "gpu_processes") if n > 1]
    if shared:
        yield violation(
            "gpu_shared",
            f"{max(shared):.0f} processes computed on the GPU while {arm} was measured",
            processes=max(shared),
        )


def _idle(arm: str, records: RunRecords) -> Iterator[Violation]:
    busy, _ = busy_share([r for r in records.requests if r.arm == arm], records.telemetry)
    if busy is not None and busy < MIN_BUSY_SHARE:
        yield violation(
            "gpu_idle",
            f"the GPU was busy for {busy:.0%} of the time that {arm} was measured",
            busy=busy,
            bound=MIN_BUSY_SHARE,
        )


def busy_share(
    requests: Sequence[RequestRecord], telemetry: Sequence[TelemetryRecord]
) -> tuple[float | None, str | None]:
    """Mean share of time in which a kernel ran while cells were measured; else null and why.

    A cell at a server counts from its first send to its last content event, the client's own
    pauses included: an idle GPU between two requests is one.
    """
    edges: dict[tuple[str, str, int], list[int]] = {}
    for request in requests:
        if request.chunks and not request.warmup:
            key = (request.cell_id, request.server_id, request.roll)
            edges.setdefault(key, []).extend((request.sent_ns, request.chunks[-1][0]))
    cells = [(min(times), max(times)) for times in edges.values()]
    known = [(t.t_ns, value) for t in telemetry if (value := t.values.get(BUSY)) is not None]
    inside = [
        value
        for at, value in known
        if any(start + BUSY_SPAN_NS <= at <= end for start, end in cells)
    ]
    if inside:
        return fmean(inside), None
    if not known:
        return None, "the share of busy time was not read"
    if not cells:
        return None, "no request was measured"
    longest = max(end - start for start, end in cells) * NS
    return None, (
        f"no reading looks back at measured time alone: each tells of up to "
        f"{BUSY_SPAN_NS * NS:g} s, the longest cell took {longest:.1f} s"
    )


def _values(samples: Sequence[TelemetryRecord], name: str) -> list[float]:
    return [value for s in samples if (value := s.values.get(name)) is not None]


def busy_samples(
    requests: Sequence[RequestRecord], telemetry: Sequence[TelemetryRecord]
) -> list[TelemetryRecord]:
    """Samples between a measured request's send and its last content event, in order of time."""
    ordered = sorted(telemetry, key=lambda t: t.t_ns)
    times = [t.t_ns for t in ordered]
    chosen: set[int] = set()
    for request in requests:
        if request.chunks and not request.warmup:
            first = bisect_left(times, request.sent_ns)
            chosen.update(range(first, bisect_right(times, request.chunks[-1][0])))
    return [ordered[i] for i in sorted(chosen)]
