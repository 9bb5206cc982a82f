"""The tables that explain the numbers: spread and its sources, prompts, drafts, A/A, energy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from finalbench.report import phrases
from finalbench.report.entries import (
    ARM,
    MODEL,
    RUN,
    SETTING,
    Entry,
    Field,
    Table,
    count,
    lines,
    rate,
    share,
    significant,
    table,
    word,
)
from finalbench.report.view import (
    AaRow,
    CostRow,
    DomainRow,
    EnergyRow,
    Marks,
    SpreadRow,
    VarianceRow,
)


def _careful(value: float, text: str, marks: Marks, note: str = "") -> Entry:
    return Entry(text=text, notes=lines(note, phrases.caution(marks)), value=value)


def _times(value: float, marks: Marks) -> Entry:
    return _careful(value, phrases.times(value), marks)


_SPREAD: tuple[Field[SpreadRow], ...] = (
    MODEL,
    ARM,
    Field("source", "What changes", lambda row: word(row.source)),
    Field(
        "low",
        "Slowest",
        lambda r: _careful(r.low_tok_s, phrases.tok_s(r.low_tok_s), r.marks, r.low_label),
        "tok/s",
        True,
    ),
    Field(
        "high",
        "Fastest",
        lambda r: _careful(r.high_tok_s, phrases.tok_s(r.high_tok_s), r.marks, r.high_label),
        "tok/s",
        True,
    ),
    Field("factor", "Factor", lambda row: _times(row.factor, row.marks), numeric=True),
    RUN,
)


def spread_table(rows: Iterable[SpreadRow]) -> Table:
    return table(
        "spread",
        "What moves the number, and by how much",
        _SPREAD,
        rows,
        "One axis at a time, everything else at the base setting.",
    )


def _share_of_variance(row: VarianceRow) -> Entry:
    span = row.interval
    found = f"[{100 * span.low:.0f}, {100 * span.high:.0f}] %" if span else row.reason or ""
    return share(row.share, phrases.join_words((found, phrases.caution(row.marks))))


_VARIANCE: tuple[Field[VarianceRow], ...] = (
    MODEL,
    ARM,
    Field("source", "Source", lambda row: word(row.source)),
    Field("share", "Share of variance", _share_of_variance, numeric=True),
    Field("levels", "Levels", lambda row: count(row.levels), numeric=True),
    RUN,
)


def variance_table(rows: Iterable[VarianceRow]) -> Table:
    return table(
        "variance",
        "Where the run-to-run spread comes from",
        _VARIANCE,
        rows,
        "Of log decode rates per request, each cell's own mean taken out.",
    )


def _domain_ratio(row: DomainRow) -> Entry:
    entry = rate(row.ratio, row.marks, "times")
    return replace(entry, notes=(f"vs {row.against}", *entry.notes))


_DOMAINS: tuple[Field[DomainRow], ...] = (
    MODEL,
    ARM,
    Field("domain", "Prompts", lambda row: word(row.domain)),
    Field("decode_tok_s", "Decode", lambda row: rate(row.decode_tok_s, row.marks), "tok/s", True),
    Field("ratio", "Ratio", _domain_ratio, numeric=True),
    Field(
        "acceptance_length",
        "Acceptance length",
        lambda row: significant(row.acceptance_length),
        numeric=True,
    ),
    Field("requests", "Requests", lambda row: count(row.requests), numeric=True),
    RUN,
)


def domains_table(rows: Iterable[DomainRow]) -> Table:
    return table(
        "domains",
        "The base setting by kind of prompt",
        _DOMAINS,
        rows,
        "Few requests each: read the order, not the last digit.",
    )


_AA: tuple[Field[AaRow], ...] = (
    MODEL,
    ARM,
    SETTING,
    Field("ratio", "Copy / itself", lambda row: rate(row.ratio, row.marks, "times"), numeric=True),
    Field(
        "verdict",
        "Verdict",
        lambda row: word(
            phrases.VERDICT_WORDS[row.verdict],
            tone="bad" if row.verdict in ("FASTER", "SLOWER") else "",
        ),
    ),
    Field("detectable", "Detectable effect", lambda row: share(row.detectable), numeric=True),
    RUN,
)


def aa_table(rows: Iterable[AaRow]) -> Table:
    return table(
        "aa",
        "A/A: the same server against a copy of itself",
        _AA,
        rows,
        "Anything but equivalent or inconclusive here is the machine's, not an engine's.",
    )


_COSTS: tuple[Field[CostRow], ...] = (
    MODEL,
    ARM,
    SETTING,
    Field(
        "acceptance_length",
        "Tokens a round",
        lambda row: significant(row.acceptance_length),
        numeric=True,
    ),
    Field("cost", "Round costs", lambda row: significant(row.cost), "plain steps", True),
    Field(
        "expected_gain",
        "Expected gain",
        lambda row: _times(row.expected_gain, row.marks),
        numeric=True,
    ),
    Field("gain", "Measured gain", lambda row: _times(row.gain, row.marks), numeric=True),
    RUN,
)


def costs_table(rows: Iterable[CostRow]) -> Table:
    return table(
        "costs",
        "Why drafts gain what they gain",
        _COSTS,
        rows,
        "Expected gain = tokens a round / cost of a round; against drafts off.",
    )


def _per_token(row: EnergyRow) -> Entry:
    return significant(row.joules_per_token, note=phrases.caution(row.marks))


def _joules(row: EnergyRow) -> Entry:
    return significant(row.joules, note=row.reason or "")


_ENERGY: tuple[Field[EnergyRow], ...] = (
    MODEL,
    ARM,
    Field("seconds", "Busy", lambda row: significant(row.seconds), "s", True),
    Field(
        "joules", "Energy", lambda row: significant(row.joules, note=row.reason or ""), "J", True
    ),
    Field("joules_per_token", "Per token", _per_token, "J", True),
    RUN,
)


def energy_table(rows: Iterable[EnergyRow]) -> Table:
    return table(
        "energy",
        "Energy of busy windows",
        _ENERGY,
        rows,
        "Server start and idle time are outside the windows.",
    )
