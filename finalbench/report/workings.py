"""The tables that explain the numbers: A/A, what drafts cost, energy."""

from __future__ import annotations

from collections.abc import Iterable

from finalbench.report import phrases
from finalbench.report.entries import Column, Entry, Table, number, rate, word
from finalbench.report.view import AaRow, CostRow, EnergyRow, Marks


def aa_table(rows: Iterable[AaRow]) -> Table:
    columns = (
        Column(key="model", label="Model"),
        Column(key="arm", label="Server"),
        Column(key="setting", label="Setting"),
        Column(key="ratio", label="Copy / itself", numeric=True),
        Column(key="verdict", label="Verdict"),
        Column(key="detectable", label="Detectable effect", numeric=True),
        Column(key="run", label="Run"),
    )
    body = tuple(
        (
            word(phrases.shape_name(row.model, row.marks)),
            word(row.arm),
            word(row.setting),
            rate(row.ratio, row.marks, "times"),
            word(
                phrases.VERDICT_WORDS[row.verdict],
                tone="bad" if row.verdict in ("FASTER", "SLOWER") else "",
            ),
            number(row.detectable, phrases.share(row.detectable)),
            word(row.run_id),
        )
        for row in rows
    )
    return Table(
        id="aa",
        caption="A/A: the same server against a copy of itself",
        columns=columns,
        rows=body,
        note="Anything but equivalent or inconclusive here is the machine's, not an engine's.",
    )


def costs_table(rows: Iterable[CostRow]) -> Table:
    columns = (
        Column(key="model", label="Model"),
        Column(key="arm", label="Server"),
        Column(key="setting", label="Setting"),
        Column(key="acceptance_length", label="Tokens a round", numeric=True),
        Column(key="cost", label="Round costs", unit="plain steps", numeric=True),
        Column(key="expected_gain", label="Expected gain", numeric=True),
        Column(key="gain", label="Measured gain", numeric=True),
        Column(key="run", label="Run"),
    )
    body = tuple(
        (
            word(phrases.shape_name(row.model, row.marks)),
            word(row.arm),
            word(row.setting),
            _plain(row.acceptance_length, phrases.significant(row.acceptance_length, 3)),
            _plain(row.cost, phrases.significant(row.cost, 3)),
            _careful(row.expected_gain, row.marks),
            _careful(row.gain, row.marks),
            word(row.run_id),
        )
        for row in rows
    )
    return Table(
        id="costs",
        caption="Why drafts gain what they gain",
        columns=columns,
        rows=body,
        note="Expected gain = tokens a round / cost of a round; against drafts off.",
    )


def energy_table(rows: Iterable[EnergyRow]) -> Table:
    columns = (
        Column(key="model", label="Model"),
        Column(key="arm", label="Server"),
        Column(key="seconds", label="Busy", unit="s", numeric=True),
        Column(key="joules", label="Energy", unit="J", numeric=True),
        Column(key="joules_per_token", label="Per token", unit="J", numeric=True),
        Column(key="run", label="Run"),
    )
    body = tuple(
        (
            word(row.model),
            word(row.arm),
            _plain(row.seconds, phrases.significant(row.seconds, 3)),
            number(row.joules, phrases.significant(row.joules, 3), row.reason or ""),
            number(row.joules_per_token, phrases.significant(row.joules_per_token, 3)),
            word(row.run_id),
        )
        for row in rows
    )
    return Table(
        id="energy",
        caption="Energy of busy windows",
        columns=columns,
        rows=body,
        note="Server start and idle time are outside the windows.",
    )


def _plain(value: float, text: str) -> Entry:
    return Entry(text=text, value=value)


def _careful(value: float, marks: Marks) -> Entry:
    notes = tuple(filter(None, (phrases.caution(marks),)))
    return Entry(text=phrases.times(value), notes=notes, value=value)
