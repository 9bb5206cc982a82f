"""The pieces every row of a page is made of: classes, intervals, values with their reasons."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Weights = Literal["real", "random"]
Acceptance = Literal["measured", "synthetic"]
Status = Literal["self-reported", "replicated", "verified", "contested", "stale"]
Verdict = Literal["FASTER", "SLOWER", "EQUIVALENT", "INCONCLUSIVE"]


class View(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Marks(View):
    """The four classes a row carries into every export."""

    weights: Weights = "real"
    acceptance: Acceptance = "measured"
    equality: str = "not_judged"
    status: Status = "self-reported"


class Interval(View):
    low: float
    high: float
    level: float = 0.95


class Measured(View):
    value: float | None = None
    interval: Interval | None = None
    blocks: tuple[float, ...] = ()
    reason: str | None = None


class Comparison(View):
    """One arm against its baseline, from paired blocks."""

    against: str
    against_label: str
    against_decode_tok_s: float | None = None
    ratio: Measured = Measured()
    verdict: Verdict = "INCONCLUSIVE"
