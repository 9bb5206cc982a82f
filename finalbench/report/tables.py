"""One definition of each table; HTML, Markdown, CSV and JSON only draw it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from finalbench.report import phrases
from finalbench.report.entries import (
    Column,
    Entry,
    Table,
    classes,
    number,
    quantile,
    rate,
    ratio,
    word,
)
from finalbench.report.sections import (
    claims_table,
    domains_table,
    equality_table,
    failures_table,
    spread_table,
    variance_table,
    violations_table,
)
from finalbench.report.view import Board, BoardRow, Cell, Page
from finalbench.report.workings import aa_table, costs_table, energy_table

_BOARD_COLUMNS = (
    Column(key="position", label="Rank", numeric=True),
    Column(key="arm", label="Server"),
    Column(key="setting", label="Setting"),
    Column(key="decode_tok_s", label="Decode", unit="tok/s", numeric=True),
    Column(key="ratio", label="Ratio", numeric=True),
    Column(key="verdict", label="Verdict"),
    Column(key="acceptance_length", label="Acceptance length", unit="tokens/round", numeric=True),
    Column(key="bandwidth_share", label="Bandwidth limit", unit="share", numeric=True),
    Column(key="blocks", label="Blocks", numeric=True),
    Column(key="classes", label="Classes"),
    Column(key="run", label="Run"),
)


def _board_row(row: BoardRow, leader: bool) -> tuple[Entry, ...]:
    rank = phrases.MISSING if row.position is None else f"{row.position}{'=' if row.tied else ''}"
    decode = rate(row.decode_tok_s, row.marks)
    if leader and row.decode_tok_s.value is not None:
        decode = replace(decode, text=f"▲ {decode.text}", tone="best")
    found = row.comparison.verdict if row.comparison else ""
    tone = {"FASTER": "good", "SLOWER": "bad", "INCONCLUSIVE": "caution"}.get(found, "")
    verdict = phrases.verdict_words(row.comparison)
    return (
        number(row.position, rank, "tie" if row.tied else ""),
        word(row.arm_label, phrases.shape_name(row.model, row.marks)),
        word(row.setting),
        decode,
        ratio(row.comparison, row.marks),
        word("not ranked", row.reason, "bad") if row.reason else word(verdict, tone=tone),
        number(row.acceptance_length, phrases.significant(row.acceptance_length, 3)),
        number(row.bandwidth_share, phrases.share(row.bandwidth_share)),
        number(row.blocks, str(row.blocks)),
        classes(row.marks),
        word(row.run_id),
    )


def board_table(board: Board, index: int = 0) -> Table:
    # A leader is marked only where some other row is measurably behind it.
    places = sorted({row.position for row in board.rows if row.position is not None})
    first = places[0] if len(places) > 1 else None
    rows = tuple(
        _board_row(row, row.position is not None and row.position == first) for row in board.rows
    )
    notes = [f"Compared at equal {board.compares}."]
    if board.resolution is not None:
        notes.append(
            f"Differences under {phrases.share(board.resolution)} cannot be told apart here; "
            "rows marked = share a rank."
        )
    if board.note:
        notes.append(board.note)
    return Table(
        id=f"board-{index + 1}",
        caption=board.title,
        columns=_BOARD_COLUMNS,
        rows=rows,
        note=" ".join(notes),
    )


_CELL_COLUMNS = (
    Column(key="model", label="Model"),
    Column(key="arm", label="Server"),
    Column(key="axis", label="Axis"),
    Column(key="seq_len", label="Prompt", unit="tokens", numeric=True),
    Column(key="output_len", label="Output", unit="tokens", numeric=True),
    Column(key="sampling", label="Sampling"),
    Column(key="draft", label="Draft"),
    Column(key="concurrency", label="Streams", numeric=True),
    Column(key="decode_tok_s", label="Decode", unit="tok/s", numeric=True),
    Column(key="e2e_tok_s", label="End to end", unit="tok/s", numeric=True),
    Column(key="ratio", label="Ratio", numeric=True),
    Column(key="acceptance_length", label="Acceptance length", unit="tokens/round", numeric=True),
    Column(key="ttft_p50", label="First token p50", unit="ms", numeric=True),
    Column(key="bandwidth_share", label="Bandwidth limit", unit="share", numeric=True),
    Column(key="requests", label="Requests", numeric=True),
    Column(key="classes", label="Classes"),
    Column(key="validity", label="Validity"),
    Column(key="run", label="Run and cell"),
)


def _cell_row(cell: Cell) -> tuple[Entry, ...]:
    failed = f"{cell.failed} failed" if cell.failed else ""
    return (
        word(phrases.shape_name(cell.model, cell.marks)),
        word(cell.arm_label),
        word(cell.axis),
        number(cell.seq_len, str(cell.seq_len), "random tokens" * (cell.text_class == "random")),
        number(cell.output_len, str(cell.output_len)),
        word(cell.sampling),
        word(cell.draft),
        number(cell.concurrency, str(cell.concurrency)),
        rate(cell.decode_tok_s, cell.marks),
        rate(cell.e2e_tok_s, cell.marks),
        ratio(cell.comparison, cell.marks),
        number(cell.acceptance_length, phrases.significant(cell.acceptance_length, 3)),
        quantile(cell.ttft_p50_s),
        number(cell.bandwidth_share, phrases.share(cell.bandwidth_share)),
        number(cell.requests, str(cell.requests), failed),
        classes(cell.marks),
        word(
            ", ".join(cell.violations) or "valid",
            ", ".join(cell.warnings),
            "bad" if cell.violations else "",
        ),
        word(cell.id, cell.run_id),
    )


def cells_table(cells: Iterable[Cell]) -> Table:
    return Table(
        id="cells",
        caption="Every cell",
        columns=_CELL_COLUMNS,
        rows=tuple(_cell_row(cell) for cell in cells),
        note="Each rate is a mean over blocks of fresh server processes, with its interval.",
    )


def all_tables(page: Page) -> tuple[Table, ...]:
    """Every table of a page in reading order; empty ones are left out.

    What is the same in every row of a page, its only run or only model, is said once elsewhere.
    """
    tables = [board_table(board, index) for index, board in enumerate(page.boards)]
    tables += [
        spread_table(page.spread),
        domains_table(page.domains),
        variance_table(page.variance),
        costs_table(page.costs),
        aa_table(page.aa),
        energy_table(page.energy),
        equality_table(page.equality),
        failures_table(page.failures),
        violations_table(page.violations),
        claims_table(page.claims),
        cells_table(page.cells),
    ]
    alike = {"run"} if len(page.runs) == 1 else set()
    if len({cell.model for cell in page.cells}) == 1:
        alike.add("model")
    return tuple(_without(table, alike) for table in tables if table.rows)


def _without(table: Table, keys: set[str]) -> Table:
    if table.id in ("claims", "cells"):
        return table
    kept = [i for i, column in enumerate(table.columns) if column.key not in keys]
    return replace(
        table,
        columns=tuple(table.columns[i] for i in kept),
        rows=tuple(tuple(row[i] for i in kept) for row in table.rows),
    )
