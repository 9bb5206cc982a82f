"""Tables on stdout, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from finalbench.aggregate import SampleSize
from finalbench.cli.finish import Finished
from finalbench.plan import Plan
from finalbench.scenario import DraftSetting, Scenario


def show_plan(scenario: Scenario, plan: Plan, size: SampleSize | None = None) -> None:
    """Needs, cells, the order of servers, about how long it takes; blocks for a wanted effect."""
    console = _console()
    hardware = scenario.hardware
    console.print(f"{scenario.title} ({scenario.name}, plan {plan.hash[:8]})", highlight=False)
    console.print(
        f"needs {hardware.devices} {hardware.device} device(s), {hardware.memory_gb:g} GB of "
        f"memory; {scenario.model.dtype}, weights {scenario.serving.weights}, "
        f"{scenario.serving.threads} threads",
        highlight=False,
    )
    table = Table("id", "arm", "seq_len", "output_len", "sampling", "draft", "conc.", "axis")
    for cell in plan.cells:
        table.add_row(
            cell.id,
            cell.arm,
            str(cell.seq_len),
            str(cell.output_len),
            cell.sampling.name,
            cell.draft.label,
            str(cell.concurrency),
            cell.axis,
        )
    console.print(table)
    for block in plan.blocks:
        console.print(f"block {block.index + 1}: {', '.join(block.order)}", highlight=False)
    requests = sum(c.requests for c in plan.cells) * len(plan.blocks)
    console.print(
        f"{len(plan.cells)} cells, {requests} requests, about {plan.estimate_s / 60:.0f} minutes",
        highlight=False,
    )
    if size is not None:
        _say(
            console,
            f"to see a change of {size.effect:.2%} four times out of five: {size.blocks} blocks "
            f"(from {size.source})",
        )
        seen = size.given_detectable
        if seen is not None:
            _say(console, f"the plan's {size.given_blocks} blocks show a change of {seen:.2%}")


def show_run(finished: Finished) -> None:
    """The cells, the headline, what is wrong, and where the files are."""
    from finalbench.report import phrases
    from finalbench.report.run_view import marks_of

    console = _console()
    analysis = finished.analysis
    marks = [marks_of(row) for row in analysis.rows]
    title = phrases.shape_name(analysis.model, marks[0]) if marks else analysis.model
    table = Table("arm", "seq_len", "sampling", "draft", title=title)
    for name in ("tok/s", "accept. len", "ratio", "equality", "valid"):
        table.add_column(name, justify="right")
    table.add_column("classes")
    for row, mark in zip(analysis.rows, marks, strict=True):
        cell, comparison = row.cell, row.comparison
        ratio = comparison.ratio if comparison is not None else None
        table.add_row(
            cell.arm,
            str(cell.seq_len),
            str(cell.sampling),
            DraftSetting.model_validate(cell.draft).label,
            _number(row.value, ".1f"),
            _number(cell.acceptance_length, ".2f"),
            "-" if ratio is None else f"{ratio:.2f}x",
            row.marks.equality,
            "yes" if row.valid else "NO",
            phrases.caution(mark) or "verified",
        )
    console.print(table)
    head = analysis.headline
    if head.ratio is not None and head.ratio_interval is not None:
        low, high = head.ratio_interval
        _say(
            console,
            f"{head.model}, {head.setting}: {head.arm} {_number(head.decode_tok_s, '.1f')} tok/s, "
            f"{head.against} {_number(head.against_decode_tok_s, '.1f')} tok/s, "
            f"{head.ratio:.2f}x ({low:.2f} to {high:.2f}), {head.verdict.value}"
            f" ({_caution_of_headline(finished)})",
        )
    else:
        _say(console, f"no headline: {'; '.join(head.reasons.values())}")
    for line, count in _grouped(f"{v.rule}: {v.message}" for v in analysis.violations):
        _say(console, f"{line}{count}")
    for line, count in _grouped(f"failed: {f.reason}" for f in analysis.failures):
        _say(console, f"{line}{count}")
    _say(console, f"status: {analysis.status}")
    for path in (finished.path, *finished.files):
        _say(console, str(path))


def _caution_of_headline(finished: Finished) -> str:
    from finalbench.report import phrases
    from finalbench.report.run_view import marks_of

    head = finished.analysis.headline
    row = next((r for r in finished.analysis.rows if r.cell.id == head.cell_id), None)
    return (phrases.caution(marks_of(row)) if row else "") or "verified"


def _grouped(lines: Iterable[str]) -> list[tuple[str, str]]:
    """Equal lines once, with how often they occur."""
    return [(line, f" ({n} times)" if n > 1 else "") for line, n in Counter(lines).items()]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _console() -> Console:
    """Where there is no terminal there is no width to keep to."""
    console = Console()
    return console if console.is_terminal else Console(width=120)
