"""The tables of what was found besides rates: equality, failures, broken rules, claims."""

from __future__ import annotations

from collections.abc import Iterable

from finalbench.report import phrases
from finalbench.report.entries import (
    MODEL,
    RUN,
    SETTING,
    Entry,
    Field,
    Table,
    count,
    share,
    significant,
    table,
    word,
)
from finalbench.report.view import ClaimRow, EqualityRow, Failure, ViolationRow

_RESULT_TONES = {
    "identical": "good",
    "ties": "good",
    "divergent": "bad",
    "not_judged": "caution",
}


def _result(row: EqualityRow) -> Entry:
    # Equal outputs of made-up weights or drafts are nothing to be coloured well.
    real = row.marks.weights == "real" and row.marks.acceptance == "measured"
    tone = _RESULT_TONES.get(row.result.split("(")[0], "") if real else ""
    return word(row.result, phrases.join_words((row.note or "", phrases.caution(row.marks))), tone)


_EQUALITY: tuple[Field[EqualityRow], ...] = (
    MODEL,
    Field("comparison", "Compared", lambda row: word(row.comparison)),
    SETTING,
    Field("result", "Result", _result),
    Field("prompts", "Outputs", lambda row: count(row.prompts), numeric=True),
    Field("positions", "Positions judged", lambda row: count(row.positions), numeric=True),
    Field("ties", "Ties", lambda row: count(row.ties), numeric=True),
    Field(
        "first_divergence",
        "First divergence",
        lambda row: word(row.first_divergence or ("none" if row.positions else None)),
    ),
    Field("tie_bound", "Tie bound", lambda row: significant(row.tie_bound, 2), "logits", True),
    Field(
        "self_rate",
        "Baseline differs from itself",
        lambda row: share(row.self_rate),
        numeric=True,
    ),
    RUN,
)


def equality_table(rows: Iterable[EqualityRow]) -> Table:
    return table(
        "equality",
        "Token-for-token equality of the timed requests",
        _EQUALITY,
        rows,
        "A tie is a position where the baseline's own two best logits lie within the bound "
        "and the engine took the other one.",
    )


_CELL: Field[Failure | ViolationRow] = Field("cell", "Cell", lambda row: word(row.cell))
_FAILURES: tuple[Field[Failure], ...] = (
    _CELL,
    Field("block", "Block", lambda row: count(row.block), numeric=True),
    Field("reason", "Reason", lambda row: word(row.reason, tone="bad")),
    RUN,
)
_VIOLATIONS: tuple[Field[ViolationRow], ...] = (
    _CELL,
    Field("rule", "Rule broken", lambda row: word(row.rule)),
    Field(
        "severity",
        "Weight",
        lambda row: word(row.severity, tone="bad" if row.severity == "invalid" else "caution"),
    ),
    Field("message", "What was found", lambda row: word(row.message)),
    Field("numbers", "Numbers", lambda row: word(row.numbers)),
    RUN,
)


def failures_table(rows: Iterable[Failure]) -> Table:
    return table("failures", "Cells that failed", _FAILURES, rows)


def violations_table(rows: Iterable[ViolationRow]) -> Table:
    return table(
        "violations",
        "Rows that break a rule",
        _VIOLATIONS,
        rows,
        "An invalid row enters no ranking and no ratio; a warning stands beside its row.",
    )


_CLAIMS: tuple[Field[ClaimRow], ...] = (
    Field("who", "Published by", lambda row: word(row.who, row.id)),
    Field("model", "Model", lambda row: word(row.model)),
    Field("claimed", "Claimed", lambda row: word(row.claimed, phrases.STATUS_WORDS[row.status])),
    Field("hardware", "Claimed on", lambda row: word(row.hardware)),
    Field("status", "Status", lambda row: word(row.status)),
    Field("measured", "Measured here", lambda row: word(row.measured or "not measured")),
    Field("unknown", "Not stated", lambda row: word(row.unknown)),
    Field("source", "Source", lambda row: word(row.source)),
)


def claims_table(rows: Iterable[ClaimRow]) -> Table:
    return table(
        "claims",
        "Published claims beside what was measured",
        _CLAIMS,
        rows,
        "A claimed figure is somebody's statement. It is never drawn with measured ones.",
    )
