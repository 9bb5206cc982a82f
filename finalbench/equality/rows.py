"""What a comparison of outputs says, and how several of them combine into a row's class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from finalbench.scenario import Frozen

Result = Literal["identical", "ties", "divergent", "not_applicable", "not_judged"]


class Divergence(Frozen):
    """Where two outputs part. `expected` is null when the reference output had already ended."""

    request_id: str
    against_request_id: str | None
    block: int
    prompt_index: int
    position: int
    common_prefix: int
    expected: int | None
    got: int | None
    gap: float | None = None


class EqualityRow(Frozen):
    """One cell against one reference.

    `positions` counts judged tokens and `ties` those where the token is not the reference's argmax
    but within `tie_bound` of it. `self_rate` is how often the reference differs from itself.
    """

    kind: Literal["drafts", "stock"]
    cell_id: str
    against: str
    result: Result
    prompts: int = 0
    positions: int = 0
    ties: int = 0
    divergent_prompts: int = 0
    unpaired: int = 0
    first: Divergence | None = None
    longest_common_prefix: int | None = None
    same_outputs: int | None = None
    tie_bound: float | None = None
    largest_gap: float | None = None
    self_rate: float | None = None
    self_rate_source: str | None = None
    reason: str | None = None

    @property
    def label(self) -> str:
        return f"ties({self.ties})" if self.result == "ties" else self.result


def class_of(rows: Sequence[EqualityRow], cell_id: str) -> tuple[str, str | None]:
    """The class a table row carries, with the reason where it has one. The worst finding decides.

    Against stock a sampled cell is `not_applicable`; drafts that change tokens make any cell
    `divergent`.
    """
    own = [row for row in rows if row.cell_id == cell_id]
    for wanted in ("divergent", "not_judged"):
        for row in own:
            if row.result == wanted:
                return row.label, row.reason
    stock = [row for row in own if row.kind == "stock"]
    if stock:
        return stock[0].label, stock[0].reason
    return "not_judged", "no stock arm judged this cell"


def diverges(rows: Iterable[EqualityRow]) -> bool:
    return any(row.result == "divergent" for row in rows)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first unequal token; a shorter output differs where it ends."""
    if left == right:
        return None
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
