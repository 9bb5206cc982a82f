"""Tables -> CSV and JSON. Every row takes its classes along."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from finalbench.report import phrases
from finalbench.report.entries import Table
from finalbench.report.view import Page

SCHEMA_VERSION = 1


def page_document(page: Page, made: Sequence[Table]) -> dict[str, Any]:
    """The page as data: headlines in words, and every row of its tables as an object."""
    return {
        "schema_version": SCHEMA_VERSION,
        "headlines": [
            {
                "sentence": phrases.headline_sentence(headline),
                "interval": phrases.interval_sentence(headline),
                "classes": list(phrases.mark_words(headline.marks)),
            }
            for headline in page.headlines
        ],
        "runs": [{"id": run.id, "status": run.status} for run in page.runs],
        "tables": {table.id: _records(table) for table in made},
    }


def page_json(page: Page, made: Sequence[Table]) -> str:
    return (
        json.dumps(page_document(page, made), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    )


def benchmark_action(page: Page) -> str:
    """`customBiggerIsBetter` entries of benchmark-action, to draw a trend; it judges nothing."""
    entries = []
    for cell in page.cells:
        if cell.decode_tok_s.value is None:
            continue
        span = cell.decode_tok_s.interval
        parts = (
            phrases.shape_name(cell.model, cell.marks),
            cell.arm_label,
            f"{cell.seq_len} in, {cell.output_len} out",
            cell.sampling,
            cell.draft,
            *([cell.cache] if cell.cache != "cold" else []),
        )
        entry: dict[str, Any] = {
            "name": ", ".join(parts),
            "unit": "tok/s",
            "value": cell.decode_tok_s.value,
            "extra": phrases.join_words((*phrases.mark_words(cell.marks), cell.run_id)),
        }
        if span is not None:
            entry["range"] = f"± {phrases.significant((span.high - span.low) / 2, 3)}"
        entries.append(entry)
    return json.dumps(entries, indent=1, ensure_ascii=False) + "\n"


def table_csv(table: Table) -> str:
    """One line per row; `_shown` columns hold the text a reader saw, its cautions included."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads: list[str] = []
    for column in table.columns:
        heads += [column.key, f"{column.key}_shown"] if column.numeric else [column.key]
    writer.writerow(heads)
    for row in table.rows:
        line: list[Any] = []
        for column, entry in zip(table.columns, row, strict=True):
            shown = _inert(entry.plain)
            line += (
                ["" if entry.value is None else entry.value, shown] if column.numeric else [shown]
            )
        writer.writerow(line)
    return out.getvalue()


def _inert(text: str) -> str:
    """A leading character that a spreadsheet would run as a formula is defused."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _records(table: Table) -> list[dict[str, Any]]:
    """Each row as an object; `caution`: the words that lower its claim, where there are any."""
    found = []
    for row, caution in zip(table.rows, table.cautions, strict=True):
        record: dict[str, Any] = {
            column.key: {"value": entry.value, "shown": entry.plain}
            if column.numeric
            else entry.plain
            for column, entry in zip(table.columns, row, strict=True)
        }
        found.append({**record, "caution": caution} if caution else record)
    return found
