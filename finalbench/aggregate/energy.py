"""Energy of the measured windows, from power samples inside them; start and idle time are left out.

Integrated by trapezium between samples, with the power at a window's edges interpolated.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from finalbench.aggregate.rows import EnergyRow
from finalbench.metrics import count_tokens, is_valid
from finalbench.record import RequestRecord, RunRecords
from finalbench.validity import busy_share

POWER = "gpu_power_w"
MIN_SAMPLES = 10
NS = 1e-9

Window = tuple[int, int]
Sample = tuple[int, float]


def energy_table(records: RunRecords) -> tuple[EnergyRow, ...]:
    """One row per arm; null with a reason where power was not seen while the arm was busy."""
    samples = sorted(
        (t.t_ns, value) for t in records.telemetry if (value := t.values.get(POWER)) is not None
    )
    rows = []
    for arm in records.run.scenario.arms:
        own = [r for r in records.requests if r.arm == arm and not r.warmup]
        busy, reason = busy_share(own, records.telemetry)
        row = energy_row(arm, own, samples)
        rows.append(row.model_copy(update={"gpu_busy_share": busy, "gpu_busy_reason": reason}))
    return tuple(rows)


def energy_row(arm: str, requests: Sequence[RequestRecord], samples: Sequence[Sample]) -> EnergyRow:
    valid = [r for r in requests if is_valid(r)]
    windows = merged([(r.sent_ns, r.chunks[-1][0]) for r in requests if r.chunks])
    times = [at for at, _ in samples]
    inside = sum(bisect_right(times, end) - bisect_left(times, start) for start, end in windows)
    seconds = sum(end - start for start, end in windows) * NS
    if not samples:
        return EnergyRow(arm=arm, seconds=seconds, samples=0, reason="no power sensor was read")
    if inside < MIN_SAMPLES:
        reason = f"{inside} power samples while busy; {MIN_SAMPLES} are needed"
        return EnergyRow(arm=arm, seconds=seconds, samples=inside, reason=reason)
    joules = sum(energy_j(samples, window) for window in windows)
    tokens = sum(count_tokens(r)[1] or 0 for r in valid)
    return EnergyRow(
        arm=arm,
        seconds=seconds,
        samples=inside,
        joules=joules,
        tokens=tokens,
        joules_per_token=joules / tokens if tokens else None,
        reason=None if tokens else "no valid request",
    )


def energy_j(samples: Sequence[Sample], window: Window) -> float:
    """Joules inside one window. `samples` are sorted and not empty."""
    start, end = window
    inner = [s for s in samples if start < s[0] < end]
    points = [(start, _power_at(samples, start)), *inner, (end, _power_at(samples, end))]
    return sum(
        (late - early) * NS * (left + right) / 2
        for (early, left), (late, right) in itertools.pairwise(points)
    )


def merged(windows: Sequence[Window]) -> list[Window]:
    """Overlapping windows joined, so that no second counts twice."""
    out: list[Window] = []
    for start, end in sorted(windows):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def _power_at(samples: Sequence[Sample], at: int) -> float:
    index = bisect_left([t for t, _ in samples], at)
    if index == 0:
        return samples[0][1]
    if index == len(samples):
        return samples[-1][1]
    (early, left), (late, right) = samples[index - 1], samples[index]
    return left + (right - left) * (at - early) / (late - early)
