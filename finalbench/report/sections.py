"""The tables of spread, equality, failures, violations and claims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from finalbench.report import phrases
from finalbench.report.entries import Column, Entry, Table, lines, number, rate, word
from finalbench.report.view import (
    ClaimRow,
    DomainRow,
    EqualityRow,
    Failure,
    SpreadRow,
    VarianceRow,
    ViolationRow,
)

_EQUALITY_COLUMNS = (
    Column(key="model", label="Model"),
    Column(key="comparison", label="Compared"),
    Column(key="setting", label="Setting"),
    Column(key="result", label="Result"),
    Column(key="prompts", label="Outputs", numeric=True),
    Column(key="positions", label="Positions judged", numeric=True),
    Column(key="ties", label="Ties", numeric=True),
    Column(key="first_divergence", label="First divergence"),
    Column(key="tie_bound", label="Tie bound", unit="logits", numeric=True),
    Column(key="self_rate", label="Baseline differs from itself", numeric=True),
    Column(key="run", label="Run"),
)


def _equality_row(row: EqualityRow) -> tuple[Entry, ...]:
    base = row.result.split("(")[0]
    tone = {"identical": "good", "ties": "good", "divergent": "bad", "not_judged": "caution"}.get(
        base, ""
    )
    return (
        word(row.model),
        word(row.comparison),
        word(row.setting),
        word(row.result, row.note or "", tone),
        number(row.prompts, str(row.prompts)),
        number(row.positions, str(row.positions)),
        number(row.ties, str(row.ties)),
        word(row.first_divergence or ("none" if row.positions else None)),
        number(row.tie_bound, phrases.significant(row.tie_bound, 2)),
        number(row.self_rate, phrases.share(row.self_rate)),
        word(row.run_id),
    )


def equality_table(rows: Iterable[EqualityRow]) -> Table:
    return Table(
        id="equality",
        caption="Token-for-token equality of the timed requests",
        columns=_EQUALITY_COLUMNS,
        rows=tuple(_equality_row(row) for row in rows),
        note=(
            "A tie is a position where the baseline's own two best logits lie within the bound "
            "and the engine took the other one."
        ),
    )


_SPREAD_COLUMNS = (
    Column(key="model", label="Model"),
    Column(key="arm", label="Server"),
    Column(key="source", label="What changes"),
    Column(key="low", label="Slowest", unit="tok/s", numeric=True),
    Column(key="high", label="Fastest", unit="tok/s", numeric=True),
    Column(key="factor", label="Factor", numeric=True),
    Column(key="run", label="Run"),
)


def _spread_row(row: SpreadRow) -> tuple[Entry, ...]:
    care = phrases.caution(row.marks)
    low, high = lines(row.low_label, care), lines(row.high_label, care)
    return (
        word(phrases.shape_name(row.model, row.marks)),
        word(row.arm),
        word(row.source),
        Entry(text=phrases.tok_s(row.low_tok_s), notes=low, value=row.low_tok_s),
        Entry(text=phrases.tok_s(row.high_tok_s), notes=high, value=row.high_tok_s),
        Entry(text=phrases.times(row.factor), notes=lines(care), value=row.factor),
        word(row.run_id),
    )


def spread_table(rows: Iterable[SpreadRow]) -> Table:
    return Table(
        id="spread",
        caption="What moves the number, and by how much",
        columns=_SPREAD_COLUMNS,
        rows=tuple(_spread_row(row) for row in rows),
        note="One axis at a time, everything else at the base setting.",
    )


def variance_table(rows: Iterable[VarianceRow]) -> Table:
    columns = (
        Column(key="model", label="Model"),
        Column(key="arm", label="Server"),
        Column(key="source", label="Source"),
        Column(key="share", label="Share of variance", numeric=True),
        Column(key="levels", label="Levels", numeric=True),
        Column(key="run", label="Run"),
    )
    body = []
    for row in rows:
        span = row.interval
        note = f"[{100 * span.low:.0f}, {100 * span.high:.0f}] %" if span else row.reason or ""
        body.append(
            (
                word(phrases.shape_name(row.model, row.marks)),
                word(row.arm),
                word(row.source),
                number(row.share, phrases.share(row.share), note),
                number(row.levels, phrases.MISSING if row.levels is None else str(row.levels)),
                word(row.run_id),
            )
        )
    return Table(
        id="variance",
        caption="Where the run-to-run spread comes from",
        columns=columns,
        rows=tuple(body),
        note="Of log decode rates per request, each cell's own mean taken out.",
    )


def domains_table(rows: Iterable[DomainRow]) -> Table:
    columns = (
        Column(key="model", label="Model"),
        Column(key="arm", label="Server"),
        Column(key="domain", label="Prompts"),
        Column(key="decode_tok_s", label="Decode", unit="tok/s", numeric=True),
        Column(key="ratio", label="Ratio", numeric=True),
        Column(key="acceptance_length", label="Acceptance length", numeric=True),
        Column(key="requests", label="Requests", numeric=True),
        Column(key="run", label="Run"),
    )
    body = tuple(
        (
            word(phrases.shape_name(row.model, row.marks)),
            word(row.arm),
            word(row.domain),
            rate(row.decode_tok_s, row.marks),
            _against(rate(row.ratio, row.marks, "times"), row),
            number(row.acceptance_length, phrases.significant(row.acceptance_length, 3)),
            number(row.requests, str(row.requests)),
            word(row.run_id),
        )
        for row in rows
    )
    return Table(
        id="domains",
        caption="The base setting by kind of prompt",
        columns=columns,
        rows=body,
        note="Few requests each: read the order, not the last digit.",
    )


def _against(entry: Entry, row: DomainRow) -> Entry:
    return replace(entry, notes=(f"vs {row.against}", *entry.notes))


def failures_table(rows: Iterable[Failure]) -> Table:
    columns = (
        Column(key="cell", label="Cell"),
        Column(key="block", label="Block", numeric=True),
        Column(key="reason", label="Reason"),
        Column(key="run", label="Run"),
    )
    body = tuple(
        (
            word(row.cell),
            number(row.block, phrases.MISSING if row.block is None else str(row.block)),
            word(row.reason, tone="bad"),
            word(row.run_id),
        )
        for row in rows
    )
    return Table(id="failures", caption="Cells that failed", columns=columns, rows=body)


def violations_table(rows: Iterable[ViolationRow]) -> Table:
    columns = (
        Column(key="cell", label="Cell"),
        Column(key="rule", label="Rule broken"),
        Column(key="severity", label="Weight"),
        Column(key="message", label="What was found"),
        Column(key="numbers", label="Numbers"),
        Column(key="run", label="Run"),
    )
    body = tuple(
        (
            word(row.cell),
            word(row.rule),
            word(row.severity, tone="bad" if row.severity == "invalid" else "caution"),
            word(row.message),
            word(row.numbers),
            word(row.run_id),
        )
        for row in rows
    )
    return Table(
        id="violations",
        caption="Rows that break a rule",
        columns=columns,
        rows=body,
        note="An invalid row enters no ranking and no ratio; a warning stands beside its row.",
    )


def claims_table(rows: Iterable[ClaimRow]) -> Table:
    columns = (
        Column(key="who", label="Published by"),
        Column(key="model", label="Model"),
        Column(key="claimed", label="Claimed"),
        Column(key="hardware", label="Claimed on"),
        Column(key="status", label="Status"),
        Column(key="measured", label="Measured here"),
        Column(key="unknown", label="Not stated"),
        Column(key="source", label="Source"),
    )
    body = tuple(
        (
            word(row.who, row.id),
            word(row.model),
            word(row.claimed, phrases.STATUS_WORDS[row.status]),
            word(row.hardware),
            word(row.status),
            word(row.measured or "not measured"),
            word(row.unknown),
            word(row.source),
        )
        for row in rows
    )
    return Table(
        id="claims",
        caption="Published claims beside what was measured",
        columns=columns,
        rows=body,
        note="A claimed figure is somebody's statement. It is never drawn with measured ones.",
    )
