"""Analyses -> boards: who is ahead, who is level, and who may not be ranked at all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from finalbench.aggregate.compare import block_values, compare
from finalbench.aggregate.rows import (
    STATUS_ORDER,
    Analysis,
    Board,
    BoardRow,
    ResultRow,
)
from finalbench.stats import Verdict

_Entry = tuple[Analysis, ResultRow]


def leaderboard(analyses: Sequence[Analysis]) -> list[Board]:
    """One board per comparable group and status, verified first; states never share a ranking.

    A board holds the rows at each run's base setting that differ only in arm or drafts.
    """
    groups: dict[tuple[tuple[str, str], ...], list[_Entry]] = {}
    for analysis in analyses:
        for row in _base_rows(analysis):
            groups.setdefault(_key(analysis, row), []).append((analysis, row))
    boards = [_board(dict(key), entries) for key, entries in groups.items()]
    return sorted(boards, key=lambda b: STATUS_ORDER.index(b.status))


def _base_rows(analysis: Analysis) -> list[ResultRow]:
    bases = [r.cell for r in analysis.rows if r.cell.axis == "base"]
    pair_keys = {c.pair_key for c in bases}
    copies = {a.twin for a in analysis.aa}
    return [r for r in analysis.rows if r.cell.pair_key in pair_keys and r.cell.arm not in copies]


def _key(analysis: Analysis, row: ResultRow) -> tuple[tuple[str, str], ...]:
    """Everything that must be equal for two rows to share a ranking."""
    return (
        ("model", analysis.model),
        ("hardware", analysis.hardware),
        ("dtype", analysis.dtype),
        ("workload", row.cell.pair_key),
        ("setting", f"{row.cell.seq_len} in, {row.cell.output_len} out, {row.cell.sampling}"),
        ("text", row.cell.text_class),
        ("concurrency", str(row.cell.concurrency)),
        *((("cache", row.cell.cache),) if row.cell.cache != "cold" else ()),
        ("weights", row.marks.weights),
        ("acceptance", row.marks.acceptance),
        ("status", row.marks.status),
    )


def _board(key: dict[str, str], entries: Sequence[_Entry]) -> Board:
    ranked: list[_Entry] = []
    unranked: list[BoardRow] = []
    for analysis, row in entries:
        reason = _unrankable(row)
        if reason is None:
            ranked.append((analysis, row))
        else:
            unranked.append(
                BoardRow(position=None, tied=False, run_id=analysis.run_id, row=row, reason=reason)
            )
    ranked.sort(key=lambda e: (-(e[1].value or 0.0), e[0].run_id, e[1].cell.id))
    groups: list[list[_Entry]] = []
    for entry in ranked:
        if groups and not _apart(groups[-1][0], entry):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    rows: list[BoardRow] = []
    for group in groups:
        position = len(rows) + 1
        rows += [
            BoardRow(position=position, tied=len(group) > 1, run_id=a.run_id, row=r)
            for a, r in group
        ]
    status = entries[0][1].marks.status
    return Board(
        key=key,
        status=status,
        metric=entries[0][1].metric,
        rows=(*rows, *unranked),
        resolution=_resolution(ranked),
        note="rows that share a position cannot be told apart"
        if any(r.tied for r in rows)
        else None,
    )


def _unrankable(row: ResultRow) -> str | None:
    invalid = [v for v in row.violations if v.severity == "invalid"]
    if invalid:
        return f"invalid: {invalid[0].rule}"
    if row.value is None:
        return row.cell.reasons.get(row.metric, "no rate")
    if row.marks.equality == "divergent":
        return "outputs diverge"
    return None


def _apart(leader: _Entry, other: _Entry) -> bool:
    """Whether the leader is measurably ahead: paired within one run, by intervals across runs."""
    if leader[0].run_id == other[0].run_id:
        return compare(leader[1].cell, other[1].cell).verdict is Verdict.FASTER
    mine = leader[1].cell.decode_tok_s_interval
    theirs = other[1].cell.decode_tok_s_interval
    return mine is not None and theirs is not None and mine[0] > theirs[1]


def _resolution(ranked: Sequence[_Entry]) -> float | None:
    """The largest of the detectable effects between neighbours: smaller gaps are not resolved."""
    found: list[float] = []
    for (one, left), (two, right) in pairwise(ranked):
        if one.run_id == two.run_id and set(block_values(left.cell, left.metric)) & set(
            block_values(right.cell, right.metric)
        ):
            effect = compare(left.cell, right.cell).detectable
            if effect is not None:
                found.append(effect)
    return max(found) if found else None
