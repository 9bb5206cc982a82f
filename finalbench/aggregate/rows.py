"""What a run says once everything is judged: the models every report, gate and claim reads."""

from __future__ import annotations

from typing import Any, Literal

from finalbench.equality import EqualityRow
from finalbench.metrics import CellRow
from finalbench.provenance import Provenance
from finalbench.record import BareLoop, Failure, Roll
from finalbench.scenario import Frozen
from finalbench.stats import Component, Verdict
from finalbench.validity import Violation

Status = Literal["verified", "replicated", "self-reported", "contested", "stale"]
STATUS_ORDER: tuple[Status, ...] = (
    "verified",
    "replicated",
    "self-reported",
    "contested",
    "stale",
)


class Marks(Frozen):
    """The four classes a row carries into every export."""

    weights: Literal["real", "random"]
    acceptance: Literal["measured", "synthetic"]
    equality: str
    equality_reason: str | None = None
    status: Status = "self-reported"

    @property
    def lossless(self) -> bool:
        """Only real weights with measured acceptance and proven outputs may be called so."""
        proven = self.equality == "identical" or self.equality.startswith("ties(")
        return proven and self.weights == "real" and self.acceptance == "measured"


class Pair(Frozen):
    """Both arms in one block, and the candidate's slot less the baseline's."""

    block: int
    candidate: float
    baseline: float
    slots: float | None


class Comparison(Frozen):
    """A cell against a baseline arm's cell with the same prompts and sampling, block by block.

    `ratio` is the geometric mean of the blocks' ratios (at equal slots, where the order was
    fitted); `detectable` the smallest relative effect that would be found four times out of five.
    """

    metric: str
    against: str
    against_cell: str
    value: float | None
    against_value: float | None
    ratio: float | None = None
    ratio_interval: tuple[float, float] | None = None
    bootstrap_interval: tuple[float, float] | None = None
    p_value: float | None = None
    holm_p: float | None = None
    verdict: Verdict = Verdict.INCONCLUSIVE
    detectable: float | None = None
    order_effect: float | None = None
    trend_total: float | None = None
    pairs: tuple[Pair, ...] = ()
    reason: str | None = None


class ResultRow(Frozen):
    """One cell with everything known about it."""

    cell: CellRow
    label: str
    marks: Marks
    comparisons: tuple[Comparison, ...]
    violations: tuple[Violation, ...]

    @property
    def valid(self) -> bool:
        return not any(v.severity == "invalid" for v in self.violations)

    @property
    def metric(self) -> str:
        """The rate that stands for the cell: one stream or many."""
        return "decode_tok_s" if self.cell.concurrency == 1 else "steady_tok_s"

    @property
    def value(self) -> float | None:
        return self.cell.rates[self.metric].value

    @property
    def comparison(self) -> Comparison | None:
        """Against the faster baseline: the smaller ratio is the one that may be quoted."""
        known = [c for c in self.comparisons if c.ratio is not None]
        if not known:
            return self.comparisons[0] if self.comparisons else None
        return min(known, key=lambda c: c.ratio or 0.0)


class Headline(Frozen):
    """The declared base cell of the first arm that is not a baseline; null values have reasons."""

    model: str
    arm: str
    cell_id: str | None
    setting: str | None
    against: str | None
    decode_tok_s: float | None
    against_decode_tok_s: float | None
    ratio: float | None
    ratio_interval: tuple[float, float] | None
    verdict: Verdict
    equality: str
    acceptance_length: float | None
    bandwidth_share: float | None
    weights: Literal["real", "random"]
    acceptance: Literal["measured", "synthetic"]
    blocks: int = 0
    detectable: float | None = None
    reasons: dict[str, str]


class BoardRow(Frozen):
    """`position` is shared by a tie group and null for a row that may not be ranked."""

    position: int | None
    tied: bool
    run_id: str
    row: ResultRow
    reason: str | None = None


class Board(Frozen):
    """Rows that may be compared: same model, hardware, precision, workload and classes."""

    key: dict[str, str]
    status: Status
    metric: str
    rows: tuple[BoardRow, ...]
    resolution: float | None
    note: str | None = None


class SpreadRow(Frozen):
    """How far one axis moves one arm's rate, everything else at the base setting."""

    arm: str
    axis: str
    points: tuple[tuple[str, float], ...]
    low_label: str
    low_tok_s: float
    high_label: str
    high_tok_s: float
    factor: float


class VarianceTable(Frozen):
    """Sources of an arm's run-to-run spread, as shares of the variance of log rates."""

    arm: str
    observations: int
    cv: float | None
    components: tuple[Component, ...]
    reason: str | None


class AaRow(Frozen):
    """An arm against a second copy of itself: what counts as a difference on this machine."""

    arm: str
    twin: str
    cell_id: str
    label: str
    comparison: Comparison


class DraftCost(Frozen):
    """`cost` is a verify round in steps without drafts; `expected_gain` = acceptance / cost.

    The measured `gain` is a little lower: the last round of a request is cut. It is the ratio of
    pooled rates; interval and verdict are those of the blocks.
    """

    arm: str
    cell_id: str
    label: str
    acceptance_length: float
    step_s: float
    round_s: float
    cost: float
    expected_gain: float
    gain: float
    gain_interval: tuple[float, float] | None
    verdict: Verdict


class EnergyRow(Frozen):
    """Joules of the windows in which an arm was busy, `seconds` long in all."""

    arm: str
    seconds: float
    samples: int
    joules: float | None = None
    tokens: int | None = None
    joules_per_token: float | None = None
    reason: str | None = None
    gpu_busy_share: float | None = None
    gpu_busy_reason: str | None = None


class DomainSplit(Frozen):
    """The headline cell by prompt domain; a drafter fitted to some prompts shows here."""

    domain: str
    requests: int
    decode_tok_s: float | None
    against_decode_tok_s: float | None
    ratio: float | None
    acceptance_length: float | None
    reason: str | None = None


class BareBlockRow(Frozen):
    """One block: the ratio over its turns, HTTP by bare, with the interval that they give."""

    block: int
    turns: int
    share: float | None
    low: float | None
    high: float | None
    reason: str | None


class BareComparison(Frozen):
    """The baseline over HTTP against its bare loop in the same run.

    `low` and `high` are the 95 % interval of `share` over blocks, null where it was timed once.
    """

    bare_decode_tok_s: float | None
    http_decode_tok_s: float | None
    share: float | None
    reason: str | None
    low: float | None = None
    high: float | None = None
    blocks: tuple[BareBlockRow, ...] = ()
    same_tokens: bool | None = None  # both gave the same ids in every turn


class Analysis(Frozen):
    """One run, judged."""

    run_id: str
    path: str
    status: str
    scenario: str
    scenario_hash: str
    model: str
    hardware: str
    dtype: str
    weights: Literal["real", "random"]
    rows: tuple[ResultRow, ...]
    equality: tuple[EqualityRow, ...]
    violations: tuple[Violation, ...]
    headline: Headline
    spread: tuple[SpreadRow, ...]
    variance: tuple[VarianceTable, ...]
    domains: tuple[DomainSplit, ...]
    draft_costs: tuple[DraftCost, ...]
    energy: tuple[EnergyRow, ...]
    aa: tuple[AaRow, ...]
    aa_reason: str | None
    bare_loop: BareComparison
    bare_loop_raw: BareLoop | None
    rolls: tuple[Roll, ...]
    failures: tuple[Failure, ...]
    memory: dict[str, Any]
    provenance: Provenance
    settings: dict[str, dict[str, Any]]  # by arm, as its first measuring server read them back

    def row(self, cell_id: str) -> ResultRow:
        return next(r for r in self.rows if r.cell.id == cell_id)
