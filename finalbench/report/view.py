"""What a page needs, and nothing else: the typed view that every output format is drawn from.

Units are in the names (`_tok_s`, `_s`, `_share`). A missing value is `None` and carries a reason.
"""

from __future__ import annotations

from typing import Literal

from finalbench.report.quantities import Comparison as Comparison
from finalbench.report.quantities import Interval as Interval
from finalbench.report.quantities import Marks as Marks
from finalbench.report.quantities import Measured as Measured
from finalbench.report.quantities import Status as Status
from finalbench.report.quantities import Verdict as Verdict
from finalbench.report.quantities import View as View


class Headline(View):
    run_id: str = ""
    model: str
    hardware: str
    arm_label: str
    setting: str
    decode_tok_s: Measured
    comparison: Comparison | None
    acceptance_length: float | None = None
    bandwidth_share: float | None = None
    marks: Marks = Marks()
    pairs: tuple[tuple[float, float], ...] = ()


class BoardRow(View):
    position: int | None
    tied: bool = False
    run_id: str
    model: str
    arm: str
    arm_label: str
    setting: str
    decode_tok_s: Measured
    comparison: Comparison | None = None
    acceptance_length: float | None = None
    bandwidth_share: float | None = None
    blocks: int = 0
    marks: Marks = Marks()
    reason: str | None = None


class Board(View):
    """Rows that may be compared: same model, hardware, precision, scenario and classes."""

    title: str
    compares: str
    rows: tuple[BoardRow, ...]
    resolution: float | None = None
    note: str | None = None


class Cell(View):
    run_id: str
    id: str
    model: str
    arm: str
    arm_label: str
    axis: str
    seq_len: int
    output_len: int
    sampling: str
    draft: str
    concurrency: int
    text_class: str = "natural"
    cache: str = "cold"
    cache_label: str = ""  # what prompts met in the server's cache; empty for a cold cell
    requests: int = 0
    failed: int = 0
    decode_tok_s: Measured = Measured()
    e2e_tok_s: Measured = Measured()
    steady_tok_s: Measured = Measured()
    ttft_p50_s: Measured = Measured()
    e2e_p50_s: Measured = Measured()
    e2e_p99_s: Measured = Measured()
    acceptance_length: float | None = None
    accepted_per_position: tuple[float, ...] = ()
    bandwidth_share: float | None = None
    limit_tok_s: float | None = None
    comparison: Comparison | None = None
    marks: Marks = Marks()
    violations: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class EqualityRow(View):
    run_id: str
    model: str
    comparison: str
    setting: str
    result: str
    prompts: int
    positions: int
    ties: int = 0
    first_divergence: str | None = None
    tie_bound: float | None = None
    self_rate: float | None = None
    note: str | None = None
    marks: Marks = Marks()


class SpreadRow(View):
    """How far one axis or source moves one arm's rate, everything else at the base setting."""

    run_id: str
    model: str
    arm: str
    source: str
    low_label: str
    low_tok_s: float
    high_label: str
    high_tok_s: float
    marks: Marks = Marks()

    @property
    def factor(self) -> float:
        return self.high_tok_s / self.low_tok_s


class VarianceRow(View):
    """One source's share of an arm's run-to-run variance of log rates."""

    run_id: str
    model: str
    arm: str
    source: str
    share: float | None
    interval: Interval | None = None
    levels: int | None = None
    reason: str | None = None
    marks: Marks = Marks()


class DomainRow(View):
    """The base cell by prompt domain: a drafter fitted to some prompts shows here."""

    run_id: str
    model: str
    arm: str
    domain: str
    requests: int
    decode_tok_s: Measured
    against: str
    ratio: Measured
    acceptance_length: float | None = None
    marks: Marks = Marks()


class AaRow(View):
    """An arm against a copy of itself: what counts as a difference on this machine."""

    run_id: str
    model: str
    arm: str
    setting: str
    ratio: Measured
    verdict: Verdict
    detectable: float | None = None
    marks: Marks = Marks()


class CostRow(View):
    """Tokens a round against what a round costs, in steps without drafts."""

    run_id: str
    model: str
    arm: str
    setting: str
    acceptance_length: float
    cost: float
    expected_gain: float
    gain: float
    marks: Marks = Marks()


class EnergyRow(View):
    """Energy of the windows in which an arm was busy."""

    run_id: str
    model: str
    arm: str
    seconds: float
    joules: float | None
    joules_per_token: float | None
    reason: str | None = None
    marks: Marks = Marks()


class Failure(View):
    run_id: str
    cell: str
    block: int | None
    reason: str


class ViolationRow(View):
    run_id: str
    cell: str
    rule: str
    severity: Literal["invalid", "warning"]
    message: str
    numbers: str = ""


class Fact(View):
    group: str
    name: str
    value: str


class Roll(View):
    started_utc: str
    ended_utc: str | None
    status: str
    command: str


class Command(View):
    label: str
    text: str


class TelemetrySeries(View):
    """One sensor over one run: `t_s` from the run's start, `values` in `unit`."""

    run_id: str
    name: str
    unit: str
    t_s: tuple[float, ...]
    values: tuple[float, ...]


class RunCard(View):
    id: str
    status: str
    scenario: str
    scenario_hash: str
    models: tuple[str, ...]
    hardware: str
    blocks: int
    requests: int
    facts: tuple[Fact, ...] = ()
    rolls: tuple[Roll, ...] = ()
    commands: tuple[Command, ...] = ()
    notes: tuple[str, ...] = ()
    bare_loop: str | None = None
    root_hash: str | None = None


class ClaimRow(View):
    """A published figure beside what was measured here; never one series."""

    id: str
    who: str
    model: str
    claimed: str
    hardware: str
    status: Status
    measured: str | None
    unknown: str
    source: str


class Page(View):
    """Everything that is rendered, from one or several runs."""

    headlines: tuple[Headline, ...] = ()
    boards: tuple[Board, ...] = ()
    cells: tuple[Cell, ...] = ()
    equality: tuple[EqualityRow, ...] = ()
    spread: tuple[SpreadRow, ...] = ()
    variance: tuple[VarianceRow, ...] = ()
    domains: tuple[DomainRow, ...] = ()
    aa: tuple[AaRow, ...] = ()
    costs: tuple[CostRow, ...] = ()
    energy: tuple[EnergyRow, ...] = ()
    failures: tuple[Failure, ...] = ()
    violations: tuple[ViolationRow, ...] = ()
    runs: tuple[RunCard, ...] = ()
    telemetry: tuple[TelemetrySeries, ...] = ()
    claims: tuple[ClaimRow, ...] = ()
