"""Distinct experts per layer and round, at full depth (or the depth given)."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from vkengine.checkpoint import random_model
from vkengine.config import KNOWN_SHAPES
from vkengine.graph import Lanes, Round
from vkengine.rows import Workspace
from vkengine.state import State


def measure(name: str, layers: int | None, rounds: int) -> None:
    config = KNOWN_SHAPES[name]
    if layers is not None:
        config = replace(config, num_layers=layers, layer_types=config.layer_types[:layers])
    device = torch.device("cuda")
    weights = random_model(config, 0, device, torch.bfloat16, 1200)
    e = config.num_experts
    for k in (0, 1, 2, 3):
        state = State(config, 1, 1008, device, torch.bfloat16, True)
        lanes = Lanes.make(1, 1, device)
        lanes.join(0, 0, 7, 0, acceptance=0.8)
        total = torch.zeros(config.num_layers + 1, device=device)
        calls = torch.zeros(config.num_layers + 1, device=device)

        def seen(layer: int, ids: torch.Tensor) -> None:
            if ids.shape[0] == k + 1:  # noqa: B023 - called within this turn of the loop
                hit = torch.zeros(e, device=device)
                hit[ids.flatten().long()] = 1.0
                total[layer] += hit.sum()  # noqa: B023
                calls[layer] += 1  # noqa: B023

        one = Round(weights, state, lanes, Workspace(device), k, on_moe=seen)
        tokens: list[int] = []
        for _ in range(rounds):
            one.run()
            torch.cuda.synchronize()
            row = lanes.record[0].tolist()
            tokens += row[: row[-1]]
        mean = (total / calls.clamp(min=1))[: config.num_layers]
        expected = e * (1 - (1 - config.experts_per_token / e) ** (k + 1))
        low, high = float(mean.min()), float(mean.max())
        print(
            f"{name} M={k + 1}: distinct {float(mean.mean()):.2f} (layers {low:.2f}..{high:.2f}), "
            f"independent {expected:.2f}, distinct tokens {len(set(tokens))} of {len(tokens)}"
        )


if __name__ == "__main__":
    depth = int(sys.argv[1]) if len(sys.argv) > 1 else None
    measure("qwen35-35b-a3b", depth, 100)
