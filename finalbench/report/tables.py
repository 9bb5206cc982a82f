"""One definition of each table; HTML, Markdown, CSV and JSON only draw it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from finalbench.report import phrases
from finalbench.report.entries import (
    MODEL,
    RUN,
    SETTING,
    Entry,
    Field,
    Table,
    classes,
    count,
    number,
    quantile,
    rate,
    ratio,
    share,
    significant,
    table,
    word,
)
from finalbench.report.sections import (
    claims_table,
    equality_table,
    failures_table,
    violations_table,
)
from finalbench.report.view import Board, BoardRow, Cell, Page
from finalbench.report.workings import (
    aa_table,
    costs_table,
    domains_table,
    energy_table,
    spread_table,
    variance_table,
)

RATIO: Field[BoardRow | Cell] = Field(
    "ratio", "Ratio", lambda row: ratio(row.comparison, row.marks), numeric=True
)
ACCEPTANCE: Field[BoardRow | Cell] = Field(
    "acceptance_length",
    "Acceptance length",
    lambda row: significant(row.acceptance_length),
    "tokens/round",
    True,
)
BANDWIDTH: Field[BoardRow | Cell] = Field(
    "bandwidth_share", "Bandwidth limit", lambda row: share(row.bandwidth_share), "share", True
)
CLASSES: Field[BoardRow | Cell] = Field("classes", "Classes", lambda row: classes(row.marks))


def _rank(row: BoardRow) -> Entry:
    shown = phrases.MISSING if row.position is None else f"{row.position}{'=' if row.tied else ''}"
    return number(row.position, shown, "tie" if row.tied else "")


def _verdict(row: BoardRow) -> Entry:
    if row.reason:
        return word("not ranked", row.reason, "bad")
    found = row.comparison.verdict if row.comparison else ""
    tone = {"FASTER": "good", "SLOWER": "bad", "INCONCLUSIVE": "caution"}.get(found, "")
    return word(phrases.verdict_words(row.comparison), tone=tone)


def _board_fields(leader: int | None) -> tuple[Field[BoardRow], ...]:
    def decode(row: BoardRow) -> Entry:
        entry = rate(row.decode_tok_s, row.marks)
        if leader is None or row.position != leader or row.decode_tok_s.value is None:
            return entry
        return replace(entry, text=f"▲ {entry.text}", tone="best")

    return (
        Field("position", "Rank", _rank, numeric=True),
        Field(
            "arm",
            "Server",
            lambda row: word(row.arm_label, phrases.shape_name(row.model, row.marks)),
        ),
        SETTING,
        Field("decode_tok_s", "Decode", decode, "tok/s", True),
        RATIO,
        Field("verdict", "Verdict", _verdict),
        ACCEPTANCE,
        BANDWIDTH,
        Field("blocks", "Blocks", lambda row: count(row.blocks), numeric=True),
        CLASSES,
        RUN,
    )


def board_table(board: Board, index: int = 0) -> Table:
    # A leader is marked only where some other row is measurably behind it.
    places = sorted({row.position for row in board.rows if row.position is not None})
    notes = [f"Compared at equal {board.compares}."]
    if board.resolution is not None:
        notes.append(
            "Neighbours are compared block by block; the least resolved pair here needs a "
            f"difference of {phrases.share(board.resolution)} to be told apart. "
            "Rows marked = share a rank."
        )
    if board.note:
        notes.append(board.note)
    return table(
        f"board-{index + 1}",
        board.title,
        _board_fields(places[0] if len(places) > 1 else None),
        board.rows,
        " ".join(notes),
    )


def _prompt(cell: Cell) -> Entry:
    kind = "random tokens" if cell.text_class == "random" else ""
    return number(cell.seq_len, str(cell.seq_len), phrases.join_words((kind, cell.cache_label)))


def _requests(cell: Cell) -> Entry:
    failed = f"{cell.failed} failed" if cell.failed else ""
    return number(cell.requests, str(cell.requests), failed)


def _validity(cell: Cell) -> Entry:
    tone = "bad" if cell.violations else ""
    return word(", ".join(cell.violations) or "valid", ", ".join(cell.warnings), tone)


_CELLS: tuple[Field[Cell], ...] = (
    MODEL,
    Field("arm", "Server", lambda cell: word(cell.arm_label)),
    Field("axis", "Axis", lambda cell: word(cell.axis)),
    Field("seq_len", "Prompt", _prompt, "tokens", True),
    Field("output_len", "Output", lambda cell: count(cell.output_len), "tokens", True),
    Field("sampling", "Sampling", lambda cell: word(cell.sampling)),
    Field("draft", "Draft", lambda cell: word(cell.draft)),
    Field("concurrency", "Streams", lambda cell: count(cell.concurrency), numeric=True),
    Field("decode_tok_s", "Decode", lambda c: rate(c.decode_tok_s, c.marks), "tok/s", True),
    Field("e2e_tok_s", "End to end", lambda c: rate(c.e2e_tok_s, c.marks), "tok/s", True),
    RATIO,
    ACCEPTANCE,
    Field("ttft_p50", "First token p50", lambda cell: quantile(cell.ttft_p50_s), "ms", True),
    BANDWIDTH,
    Field("requests", "Requests", _requests, numeric=True),
    CLASSES,
    Field("validity", "Validity", _validity),
    Field("run", "Run and cell", lambda cell: word(cell.id, cell.run_id)),
)


# Stands behind the prompt's length, where some cell of the page is not cold.
_CACHE = Field("cache", "Cache", lambda cell: word(cell.cache_label or cell.cache))


def cells_table(cells: Sequence[Cell]) -> Table:
    at = [field.key for field in _CELLS].index("seq_len") + 1
    extra = (_CACHE,) if any(cell.cache != "cold" for cell in cells) else ()
    return table(
        "cells",
        "Every cell",
        (*_CELLS[:at], *extra, *_CELLS[at:]),
        cells,
        "Each rate is a mean over blocks of fresh server processes, with its interval.",
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
