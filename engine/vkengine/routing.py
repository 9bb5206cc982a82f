"""How many distinct experts the rows of one round choose.

Random weights may route rows alike, and would then read fewer weights than a real model does. The
server says what its own do, and the harness compares that with independent routing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .graph import Round
from .lanes import Lanes
from .rows import Workspace
from .step import Model

#: Rows that are counted: 1 to this many.
ROWS = 4
ROUNDS = 25


def distinct_experts(model: Model) -> list[float]:
    """Mean over layers and rounds, for 1, 2, ... rows a round."""
    return [float(distinct_by_layer(model, rows).mean()) for rows in range(1, ROWS + 1)]


def distinct_by_layer(model: Model, rows: int, rounds: int = ROUNDS) -> Tensor:
    """``[layers]``: mean number over rounds of ``rows`` rows each, from generated tokens.

    Uses the first slot, which must be free, and leaves it reset."""
    weights, state = model.weights, model.state
    device, experts = weights.embed.device, weights.config.num_experts
    state.reset(0)
    lanes = Lanes.make(1, state.null_slot, device)
    # Every draft is taken with this chance, so that rows hold generated tokens.
    lanes.join(0, 0, 7, 0, acceptance=0.8)
    total = torch.zeros(weights.config.num_layers, device=device)

    def count(layer: int, ids: Tensor) -> None:
        hit = torch.zeros(experts, device=device)
        hit[ids.flatten().long()] = 1.0
        total[layer] += hit.sum()

    mtp = weights.mtp is not None
    one = Round(weights, state, lanes, Workspace(device), rows - 1, mtp=mtp, on_moe=count)
    for _ in range(rounds):
        one.run()
    state.reset(0)
    return total / rounds
