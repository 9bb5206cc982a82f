"""Write every output of a set of runs into one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finalbench.claims import load_ledger
from finalbench.record import write_atomic
from finalbench.report import export, markdown
from finalbench.report.build import page_of, read_runs
from finalbench.report.tables import all_tables, cells_table
from finalbench.report.view import Page


def render(
    run_dirs: Sequence[Path], out_dir: Path, *, claims: Path | None = None, space: bool = False
) -> list[Path]:
    """Read the runs, write the files, return their paths. `claims` is a ledger to show beside them.

    Several runs get one page together, and a card each in `cards/`. Errors: those of
    `record.load_run`, and `BundleBroken` where a stored number is not what the records give.
    """
    ledger = load_ledger(claims) if claims else None
    runs = read_runs(run_dirs)
    written = render_page(page_of(runs, ledger=ledger), out_dir, space=space)
    if len(runs) > 1:
        (out_dir / "cards").mkdir(exist_ok=True)
        for records, analysis in sorted(runs, key=lambda judged: judged[0].run.run_id):
            page = page_of([(records, analysis)])
            path = out_dir / "cards" / f"{records.run.run_id}.md"
            write_atomic(path, markdown.card(page, all_tables(page)).encode())
            written.append(path)
    return written


def render_page(page: Page, out_dir: Path, *, space: bool = False) -> list[Path]:
    """The same page gives the same bytes, on any machine. `space` adds a static Space's files."""
    from finalbench.report import html  # matplotlib is slow to import, and a gate draws nothing

    made = all_tables(page)
    texts = {
        "leaderboard.md": markdown.leaderboard(page, made),
        "report.html": html.render(page, made),
        "card.md": markdown.card(page, made),
        "cells.csv": export.table_csv(cells_table(page.cells)),
        "report.json": export.page_json(page, made),
        "benchmark-action.json": export.benchmark_action(page),
    }
    if space:
        texts["index.html"] = texts["report.html"]
        texts["README.md"] = markdown.space_readme(page)
    out_dir.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in texts.items():
        write_atomic(out_dir / name, text.encode())
        written.append(out_dir / name)
    return written
