"""How many distinct experts the rows of one round choose.

Random weights may route rows alike, and would then read fewer weights than a real model does. The
server says what its own do, and the harness compares that with independent routing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .graph import Lanes, Round
from .rows import Workspace
from .step import Model

#: Rows that are counted: 1 to this many.
ROWS = 4
ROUNDS = 25


def distinct_experts(model: Model) -> list[float]:
    """Mean over layers and rounds, for 1, 2, ... rows a round, from generated tokens.

    Uses the first slot, which must be free, and leaves it reset."""
    weights, state = model.weights, model.state
    device, experts = weights.embed.device, weights.config.num_experts
    found = []
    for rows in range(1, ROWS + 1):
        state.reset(0)
        lanes = Lanes.make(1, state.null_slot, device)
        # Every draft is taken with this chance, so that rows hold generated tokens.
        lanes.join(0, 0, 7, 0, acceptance=0.8)
        total = torch.zeros((), device=device)
        calls = 0

        def count(_layer: int, ids: Tensor) -> None:
            nonlocal calls
            if ids.shape[0] == rows:  # noqa: B023 - called within this turn of the loop
                hit = torch.zeros(experts, device=device)
                hit[ids.flatten().long()] = 1.0
                total.add_(hit.sum())  # noqa: B023
                calls += 1

        mtp = weights.mtp is not None
        one = Round(weights, state, lanes, Workspace(device), rows - 1, mtp=mtp, on_moe=count)
        for _ in range(ROUNDS):
            one.run()
        found.append(float(total) / calls)
    state.reset(0)
    return found
