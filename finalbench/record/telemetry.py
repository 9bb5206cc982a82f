"""Samples of one sensor process as columns: what does not change is written once.

A batch is one line of telemetry.jsonl. Times are in whole microseconds and values have three
decimals, so that what is read back is what was stored, to the last digit.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Literal

from finalbench.record.models import SCHEMA_VERSION, TelemetryRecord
from finalbench.scenario import Frozen

DECIMALS = 3
US = 1_000


class TelemetryBatch(Frozen):
    """Consecutive samples. `utc`, `t_ns` are those of the first; `dt_us` the times between them.

    A sensor is in one of three: `same` has one value for all samples, `changes` the first value
    and the differences from one to the next, `values` a value for each sample, where some are null.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    utc: str
    t_ns: int
    dt_us: tuple[int, ...]
    same: dict[str, float | None]
    changes: dict[str, tuple[float, ...]]
    values: dict[str, tuple[float | None, ...]]


def packed(samples: Sequence[TelemetryRecord]) -> TelemetryBatch:
    """At least one sample, in order of time. A sensor that some of them lack is null in those."""
    first = samples[0]
    times = [s.t_ns // US for s in samples]
    same: dict[str, float | None] = {}
    changes: dict[str, tuple[float, ...]] = {}
    values: dict[str, tuple[float | None, ...]] = {}
    for name in dict.fromkeys(name for s in samples for name in s.values):
        column = [_rounded(s.values.get(name)) for s in samples]
        known = [value for value in column if value is not None]
        if len(set(column)) == 1:
            same[name] = column[0]
        elif len(known) == len(column):
            steps = (round(b - a, DECIMALS) for a, b in pairwise(known))
            changes[name] = (known[0], *steps)
        else:
            values[name] = tuple(column)
    return TelemetryBatch(
        utc=first.utc,
        t_ns=times[0] * US,
        dt_us=tuple(b - a for a, b in pairwise(times)),
        same=same,
        changes=changes,
        values=values,
    )


def unpacked(batch: TelemetryBatch) -> Iterator[TelemetryRecord]:
    """The samples of a batch. Errors: `ValueError` for columns of unequal length."""
    times = list(accumulate(batch.dt_us, initial=0))
    columns: dict[str, Sequence[float | None]] = dict(batch.values)
    for name, steps in batch.changes.items():
        columns[name] = [round(at, DECIMALS) for at in accumulate(steps)]
    for name, column in columns.items():
        if len(column) != len(times):
            raise ValueError(f"{name} has {len(column)} values for {len(times)} samples")
    began = datetime.datetime.fromisoformat(batch.utc)
    for index, at in enumerate(times):
        utc = began + datetime.timedelta(microseconds=at)
        yield TelemetryRecord(
            utc=utc.strftime("%Y-%m-%dT%H:%M:%SZ"),
            t_ns=batch.t_ns + at * US,
            values=batch.same | {name: column[index] for name, column in columns.items()},
        )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DECIMALS)
