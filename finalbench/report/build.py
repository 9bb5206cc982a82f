"""Run folders -> Page: what `aggregate` found, in the words and units of the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finalbench import aggregate
from finalbench.aggregate import Analysis
from finalbench.claims import Ledger
from finalbench.record import RunRecords, load_run
from finalbench.report import findings, phrases, view
from finalbench.report.circumstances import run_card, telemetry
from finalbench.report.claimed import claim_rows
from finalbench.report.run_view import RunView, draft_label, marks_of

Judged = tuple[RunRecords, Analysis]


def read_runs(run_dirs: Sequence[Path]) -> list[Judged]:
    """Errors: those of reading a run; a stored metrics.json that the records contradict."""
    return [(load_run(path), aggregate.analyse(path)) for path in run_dirs]


def build_page(run_dirs: Sequence[Path], *, ledger: Ledger | None = None) -> view.Page:
    """`read_runs` and `page_of` in one."""
    return page_of(read_runs(run_dirs), ledger=ledger)


def page_of(runs: Sequence[Judged], *, ledger: Ledger | None = None) -> view.Page:
    """The page of runs already judged; runs in the order of their ids."""
    ordered = sorted(runs, key=lambda pair: pair[0].run.run_id)
    analyses = [analysis for _, analysis in ordered]
    found = [RunView(records, analysis) for records, analysis in ordered]
    names = {run.run_id: run for run in found}
    return view.Page(
        headlines=tuple(run.headline() for run in found),
        boards=tuple(_board(board, names) for board in aggregate.leaderboard(analyses)),
        cells=tuple(cell for run in found for cell in run.cells()),
        equality=tuple(row for run in found for row in findings.equality(run)),
        spread=tuple(row for run in found for row in findings.spread(run)),
        variance=tuple(row for run in found for row in findings.variance(run)),
        domains=tuple(row for run in found for row in findings.domains(run)),
        aa=tuple(row for run in found for row in findings.aa(run)),
        costs=tuple(row for run in found for row in findings.costs(run)),
        energy=tuple(row for run in found for row in findings.energy(run)),
        failures=tuple(row for run in found for row in findings.failures(run)),
        violations=tuple(row for run in found for row in findings.violations(run)),
        runs=tuple(run_card(records, analysis) for records, analysis in ordered),
        telemetry=tuple(series for records, _ in ordered for series in telemetry(records)),
        claims=claim_rows(ledger, analyses) if ledger else (),
    )


def _board(board: aggregate.Board, runs: dict[str, RunView]) -> view.Board:
    key = board.key
    synthetic = key.get("acceptance") == "synthetic"
    words = (
        f"{key.get('model')} on {key.get('hardware')}, {key.get('dtype')}",
        key.get("setting", ""),
        "random weights" if key.get("weights") == "random" else "",
        "synthetic acceptance" if synthetic else "",
        phrases.STATUS_WORDS[board.status],
    )
    return view.Board(
        title=phrases.join_words(words),
        compares="model, hardware, precision, prompts, sampling, classes and status",
        rows=tuple(_board_row(row, runs[row.run_id]) for row in board.rows),
        resolution=board.resolution,
        note=None,
    )


def _board_row(row: aggregate.BoardRow, run: RunView) -> view.BoardRow:
    cell = row.row.cell
    rate = run.decode(cell)
    if cell.concurrency > 1:
        rate = view.Measured(value=row.row.value, reason=cell.reasons.get(row.row.metric))
    return view.BoardRow(
        position=row.position,
        tied=row.tied,
        run_id=row.run_id,
        model=run.model,
        arm=cell.arm,
        arm_label=run.arm_label(cell.arm),
        setting=draft_label(cell),
        decode_tok_s=rate,
        comparison=run.comparison(row.row),
        acceptance_length=cell.acceptance_length,
        bandwidth_share=cell.bandwidth_share,
        blocks=len(cell.blocks),
        marks=marks_of(row.row),
        reason=row.reason,
    )
