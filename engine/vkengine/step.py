"""One round: verify B sequences x M rows, choose the target's tokens, accept drafts.

Rows j = 0..k of a sequence hold its last committed token and its k drafts; the target's token
y_j follows row j. The leading drafts that equal y are accepted (n of them), y_0..y_n are emitted,
and the sequence's position grows by n + 1. Nothing is undone for the rejected rows: the state is
keyed by position.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .models.layout import ModelWeights
from .models.qwen3_5 import Plan, logits_of, make_plan, mark_folded, trunk
from .rows import Rows, Workspace
from .sampler import Sampler, synthetic_acceptance
from .state import State

#: On a CPU the stored recurrent state moves in blocks of this many positions.
CPU_FOLD = 8


@dataclass(slots=True)
class Model:
    """Weights, the state of all slots, and scratch memory."""

    weights: ModelWeights
    state: State
    ws: Workspace
    plan: Plan = field(init=False)

    def __post_init__(self) -> None:
        self.plan = make_plan(self.weights, self.state)


@dataclass(slots=True)
class Lane:
    """One sequence's part in a round. ``position``: absolute position of row 0."""

    slot: int
    position: int
    last: int
    sampler: Sampler
    drafts: list[int] = field(default_factory=list)
    acceptance: float | None = None  # synthetic chance; None compares


@dataclass(slots=True)
class Verdict:
    """One lane's outcome: the emitted tokens (accepted + 1) and the rows behind them."""

    tokens: list[int]
    accepted: int
    hidden: Tensor  # [M, H] after the final norm; rows 0..accepted are those of ``tokens``
    logits: Tensor  # [M, V]
    finite: bool


def verify(model: Model, tokens: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """``tokens [R] i64`` -> (hidden [R, H], logits [R, V]); advances the stored state's fold."""
    h = trunk(model.plan, model.weights.embed, tokens, rows, model.ws)
    mark_folded(model.state, rows, CPU_FOLD if h.device.type == "cpu" else 1)
    return logits_of(h, model.weights)


def run_round(model: Model, lanes: list[Lane]) -> list[Verdict]:
    """Verify all lanes in one pass. Lanes may have different numbers of drafts."""
    m = 1 + max(len(lane.drafts) for lane in lanes)
    ids: list[int] = []
    for lane in lanes:
        ids.append(lane.last)
        ids += lane.drafts
        ids += [0] * (m - 1 - len(lane.drafts))
    rows = Rows.on_host([(lane.slot, lane.position) for lane in lanes], m)
    hidden, logits = verify(model, torch.tensor(ids), rows)
    plain = all(lane.sampler.plain for lane in lanes)
    best = torch.argmax(logits, dim=-1).tolist() if plain else []
    healthy = bool(torch.isfinite(hidden.sum()))
    verdicts = []
    for b, lane in enumerate(lanes):
        start = b * m
        end = start + 1 + len(lane.drafts)
        own = logits[start:end]
        y = best[start:end] if plain else lane.sampler.choose(own, lane.position + 1, lane.drafts)
        n = accepted(lane, y)
        finite = healthy or bool(torch.isfinite(hidden[start:end].sum()))
        verdicts.append(Verdict(y[: n + 1], n, hidden[start:end], own, finite))
    return verdicts


def accepted(lane: Lane, y: list[int]) -> int:
    """How many leading drafts count as accepted."""
    n = 0
    for j, draft in enumerate(lane.drafts):
        if lane.acceptance is None:
            good = draft == y[j]
        else:
            at = lane.position + 1 + j
            sampler = lane.sampler
            good = synthetic_acceptance(sampler.seed, sampler.params.choice, at, lane.acceptance)
        if not good:
            break
        n += 1
    return n
