"""All comparisons of one run."""

from __future__ import annotations

from finalbench.equality.drafts import judge_drafts
from finalbench.equality.rows import EqualityRow
from finalbench.equality.stock import judge_stock, stock_self_rate
from finalbench.metrics import measured
from finalbench.plan import Cell
from finalbench.record import RequestRecord, RunRecords


def judge(records: RunRecords) -> list[EqualityRow]:
    """Drafting cells against their undrafted twins, and every arm against the baseline."""
    cells = records.run.plan.cells
    baseline_arm = records.run.scenario.baseline
    grouped: dict[str, list[RequestRecord]] = {}
    for request in records.requests:
        grouped.setdefault(request.cell_id, []).append(request)
    outputs = {cell.id: measured(cell, grouped.get(cell.id, ())) for cell in cells}
    scores = {score.request_id: score for score in records.scores}
    rows: list[EqualityRow] = []
    for cell in cells:
        if cell.draft.method != "none":
            rows.append(judge_drafts(cell, _undrafted(cell, cells), outputs))
        if baseline_arm is None or cell.arm == baseline_arm:
            continue
        baseline = next(
            (c for c in cells if c.arm == baseline_arm and c.pair_key == cell.pair_key), None
        )
        own = stock_self_rate(outputs[baseline.id], scores) if baseline else (None, None)
        dtype = _dtype(records, baseline_arm)
        rows.append(judge_stock(cell, baseline, outputs, scores, dtype=dtype, self_rate=own))
    return rows


def _undrafted(cell: Cell, cells: tuple[Cell, ...]) -> Cell | None:
    return next(
        (
            c
            for c in cells
            if c.arm == cell.arm and c.pair_key == cell.pair_key and c.draft.method == "none"
        ),
        None,
    )


def _dtype(records: RunRecords, arm: str) -> str:
    """The scoring arm's type as its servers state it, else the scenario's."""
    stated = {
        str(s.settings["dtype"])
        for s in records.servers
        if s.arm == arm and s.settings and "dtype" in s.settings
    }
    return stated.pop() if len(stated) == 1 else records.run.scenario.model.dtype
