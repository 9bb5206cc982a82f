"""The GPU while each arm was busy: its clock, what held it back, and who else was on it.

Only samples inside measured requests count, from a send to the last content event.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

from finalbench.record import RequestRecord, RunRecords, TelemetryRecord
from finalbench.validity.violation import Violation, violation

CLOCK = "gpu_sm_clock_mhz"
MIN_CLOCK_SAMPLES = 30
MAX_CLOCK_SPREAD = 0.05
MAX_CLOCK_OFFSET = 0.01
MIN_BUSY_SHARE = 0.5
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
    busy = _values(inside, "gpu_busy_share")
    if busy and fmean(busy) < MIN_BUSY_SHARE:
        yield violation(
            "gpu_idle",
            f"the GPU was busy for {fmean(busy):.0%} of the time that {arm} was measured",
            busy=fmean(busy),
            bound=MIN_BUSY_SHARE,
        )
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
