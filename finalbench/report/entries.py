"""Table, column and cell, and how a value becomes a cell with its cautions beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from finalbench.report import phrases
from finalbench.report.view import Comparison, Marks, Measured


@dataclass(frozen=True, slots=True)
class Column:
    key: str
    label: str
    unit: str = ""
    numeric: bool = False

    @property
    def heading(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True, slots=True)
class Entry:
    """One table cell: what is shown, quieter lines under it, and what it sorts and exports as."""

    text: str
    notes: tuple[str, ...] = ()
    value: float | str | None = None
    tone: str = ""
    flat: str = ""  # the one-line form, where text and notes are parts of one list

    @property
    def plain(self) -> str:
        if self.flat:
            return self.flat
        return f"{self.text} ({phrases.join_words(self.notes)})" if self.notes else self.text


@dataclass(frozen=True, slots=True)
class Table:
    """`cautions`: for each row the words that lower its claim, to go along with any copied cell."""

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Entry, ...], ...]
    cautions: tuple[str, ...]
    note: str = ""


Row_contra = TypeVar("Row_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Field(Generic[Row_contra]):
    """A column, and what a row puts into it."""

    key: str
    label: str
    fill: Callable[[Row_contra], Entry]
    unit: str = ""
    numeric: bool = False


def table(
    name: str, caption: str, fields: Sequence[Field[Any]], rows: Iterable[Any], note: str = ""
) -> Table:
    """Every table is made here: its columns, its rows, and each row's cautions."""
    kept = tuple(rows)
    marks = [getattr(row, "marks", None) for row in kept]
    return Table(
        id=name,
        caption=caption,
        columns=tuple(Column(f.key, f.label, f.unit, f.numeric) for f in fields),
        rows=tuple(tuple(f.fill(row) for f in fields) for row in kept),
        note=note,
        cautions=tuple(phrases.caution(m) if m else "" for m in marks),
    )


def lines(*words: str) -> tuple[str, ...]:
    return tuple(word for word in words if word)


def word(text: str | int | None, note: str = "", tone: str = "") -> Entry:
    shown = phrases.MISSING if text is None or text == "" else str(text)
    value = text if isinstance(text, int) else (text or None)
    return Entry(text=shown, notes=lines(note), value=value, tone=tone)


def rate(measured: Measured, marks: Marks, form: str = "tok_s") -> Entry:
    """A number with its interval and the words that lower its claim, in one cell."""
    show: Callable[[float | None], str] = phrases.tok_s if form == "tok_s" else phrases.times
    if measured.value is None:
        return Entry(text=phrases.MISSING, notes=lines(phrases.why(measured)), tone="null")
    notes = lines(phrases.between(measured.interval, form), phrases.caution(marks))
    return Entry(text=show(measured.value), notes=notes, value=measured.value)


def ratio(comparison: Comparison | None, marks: Marks) -> Entry:
    if comparison is None:
        return word(None)
    entry = rate(comparison.ratio, marks, "times")
    if comparison.ratio.value is None:
        return entry
    notes = (f"vs {comparison.against_label}", *entry.notes)
    tone = {"FASTER": "good", "SLOWER": "bad"}.get(comparison.verdict, "")
    return replace(entry, notes=notes, tone=tone)


def number(value: float | None, text: str, note: str = "") -> Entry:
    return Entry(text=text, value=value, notes=lines(note), tone="null" if value is None else "")


def quantile(measured: Measured) -> Entry:
    note = phrases.why(measured)
    return number(measured.value, phrases.milliseconds(measured.value), note)


def classes(marks: Marks) -> Entry:
    words = phrases.mark_words(marks)
    flat = phrases.join_words(words)
    return Entry(text=words[0], notes=words[1:], value=flat, flat=flat)


def significant(value: float | None, digits: int = 3, note: str = "") -> Entry:
    """A plain number with so many digits, or the reason that it is missing."""
    return number(value, phrases.significant(value, digits), note)


def count(value: int | None) -> Entry:
    return number(value, phrases.MISSING if value is None else str(value))


def share(value: float | None, note: str = "") -> Entry:
    return number(value, phrases.share(value), note)


# Columns that many tables have.
MODEL: Field[Any] = Field(
    "model", "Model", lambda row: word(phrases.shape_name(row.model, row.marks))
)
ARM: Field[Any] = Field("arm", "Server", lambda row: word(row.arm))
SETTING: Field[Any] = Field("setting", "Setting", lambda row: word(row.setting))
RUN: Field[Any] = Field("run", "Run", lambda row: word(row.run_id))
