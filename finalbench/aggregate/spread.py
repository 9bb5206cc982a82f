"""How far each axis moves the number, and where its run-to-run spread comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence

from finalbench.aggregate.headline import base_cell
from finalbench.aggregate.rows import ResultRow, SpreadRow, VarianceTable
from finalbench.metrics import measured, timing
from finalbench.record import RequestRecord, RunRecords
from finalbench.stats import Observation, components

AXES = ("seq_len", "output_len", "sampling", "draft", "concurrency", "cache")
SOURCES = ("process", "order", "prompt", "seed")
MAX_OBSERVATIONS = 4_000


def axis_spread(rows: Sequence[ResultRow], arm: str) -> list[SpreadRow]:
    """One row per axis on which this arm has at least two values at the base setting."""
    base = base_cell(rows, arm)
    if base is None:
        return []
    found: list[SpreadRow] = []
    for axis in AXES:
        # Streams share the machine: across concurrency only the end-to-end rate is one quantity.
        name = "e2e_tok_s" if axis == "concurrency" else "decode_tok_s"
        points: list[tuple[str, float]] = []
        for row in rows:
            value = row.cell.rates[name].value
            if row.cell.arm == arm and row.valid and value is not None and _only(base, row, axis):
                points.append((_coordinate(row, axis), value))
        if len(points) < 2:
            continue
        if all(label.isdigit() for label, _ in points):
            points.sort(key=lambda p: int(p[0]))
        low = min(points, key=lambda p: p[1])
        high = max(points, key=lambda p: p[1])
        found.append(
            SpreadRow(
                arm=arm,
                axis=axis,
                points=tuple(points),
                low_label=low[0],
                low_tok_s=low[1],
                high_label=high[0],
                high_tok_s=high[1],
                factor=high[1] / low[1],
            )
        )
    return found


def variance_table(records: RunRecords, rows: Sequence[ResultRow], arm: str) -> VarianceTable:
    """Components of the variance of log decode rates per request, each cell's mean taken out."""
    observations: list[Observation] = []
    grouped: dict[str, list[RequestRecord]] = {}
    for request in records.requests:
        grouped.setdefault(request.cell_id, []).append(request)
    slots = {s.server_id: s.order_index for s in records.servers}
    for row in rows:
        if row.cell.arm != arm or row.cell.concurrency != 1 or not row.valid:
            continue
        cell = records.run.plan.cell(row.cell.id)
        observations += _cell_observations(measured(cell, grouped.get(cell.id, ())), slots)
    if len(observations) > MAX_OBSERVATIONS:
        step = math.ceil(len(observations) / MAX_OBSERVATIONS)
        observations = observations[::step]
    result = components(observations, SOURCES)
    base = base_cell(rows, arm)
    return VarianceTable(
        arm=arm,
        observations=result.observations,
        cv=None if base is None else _cv(base),
        components=result.components,
        reason=result.reason,
    )


def _cell_observations(
    requests: Sequence[RequestRecord], slots: dict[str, int]
) -> list[Observation]:
    values: list[tuple[float, RequestRecord]] = []
    for request in requests:
        one = timing(request)
        if one.valid and one.decode_tokens and one.decode_ns:
            values.append((math.log(one.decode_tokens / one.decode_ns), request))
    if not values:
        return []
    mean = math.fsum(v for v, _ in values) / len(values)
    return [
        Observation(
            value=value - mean,
            levels={
                "process": request.server_id,
                "order": str(slots.get(request.server_id)),
                "prompt": request.prompt_digest,
                "seed": str(request.seed),
            },
            block=str(request.block),
        )
        for value, request in values
    ]


def _cv(row: ResultRow) -> float | None:
    """Coefficient of variation over blocks, that is over fresh processes."""
    values = [v for v in row.cell.decode_tok_s_blocks if v is not None]
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)) / mean


def _only(base: ResultRow, row: ResultRow, axis: str) -> bool:
    """Whether `row` equals the base in every axis but this one."""
    return all(
        _coordinate(base, other) == _coordinate(row, other) for other in AXES if other != axis
    )


def _coordinate(row: ResultRow, axis: str) -> str:
    return row.cell.draft_label if axis == "draft" else str(getattr(row.cell, axis))
