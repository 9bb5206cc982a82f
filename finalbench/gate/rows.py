"""What a gate decided, and why."""

from __future__ import annotations

from typing import Literal

from finalbench.scenario import Frozen
from finalbench.stats import Verdict

Outcome = Literal["pass", "regression", "divergent", "inconclusive", "incomparable"]

EXIT_CODES: dict[Outcome, int] = {
    "pass": 0,
    "regression": 1,
    "divergent": 1,
    "incomparable": 5,
    "inconclusive": 6,
}


class GateCell(Frozen):
    """One cell of the candidate against the same cell of the baseline run.

    `method` is `ratio` where both runs hold the baseline arm: then the ratios to it are compared,
    so that a slower host cancels. `direct` compares the rates themselves; it is always shown.
    `caution`: the words that lower the claim of either row (random weights, unverified).
    """

    cell_id: str
    label: str
    arm: str
    metric: str
    method: Literal["ratio", "direct"]
    baseline: float | None
    candidate: float | None
    ratio: float | None
    interval: tuple[float, float] | None
    direct_ratio: float | None
    direct_interval: tuple[float, float] | None
    p_value: float | None
    holm_p: float | None = None
    verdict: Verdict
    detectable: float | None
    blocks: tuple[int, int]
    caution: str
    reason: str | None = None


class Change(Frozen):
    """Something around the measurement that differs between the two runs."""

    factor: Literal["code", "packages", "driver", "system", "host"]
    name: str
    baseline: str
    candidate: str


class GateResult(Frozen):
    """`cells` are gated and can fail; `exploratory` ones are shown and cannot."""

    schema_version: Literal[1] = 1
    outcome: Outcome
    exit_code: int
    reasons: tuple[str, ...]
    baseline_run: str
    candidate_run: str
    margin: float
    cells: tuple[GateCell, ...] = ()
    exploratory: tuple[GateCell, ...] = ()
    anchor_run: str | None = None
    anchor: tuple[GateCell, ...] = ()
    changes: tuple[Change, ...] = ()
    confounded: bool = False
    detectable: float | None = None
