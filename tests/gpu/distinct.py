"""Distinct experts per layer and round, at full depth (or the depth given)."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from vkengine.checkpoint import random_model
from vkengine.config import KNOWN_SHAPES
from vkengine.routing import ROWS, distinct_by_layer
from vkengine.rows import Workspace
from vkengine.state import State
from vkengine.step import Model


def measure(name: str, layers: int | None, rounds: int) -> None:
    config = KNOWN_SHAPES[name]
    if layers is not None:
        config = replace(config, num_layers=layers, layer_types=config.layer_types[:layers])
    device = torch.device("cuda")
    weights = random_model(config, 0, device, torch.bfloat16, 1200)
    state = State(config, 1, 1008, device, torch.bfloat16, True)
    model = Model(weights, state, Workspace(device))
    e, top = config.num_experts, config.experts_per_token
    for rows in range(1, ROWS + 1):
        mean = distinct_by_layer(model, rows, rounds)
        expected = e * (1 - (1 - top / e) ** rows)
        print(
            f"{name} M={rows}: distinct {float(mean.mean()):.2f} "
            f"(layers {float(mean.min()):.2f}..{float(mean.max()):.2f}), "
            f"independent {expected:.2f}"
        )


if __name__ == "__main__":
    depth = int(sys.argv[1]) if len(sys.argv) > 1 else None
    measure("qwen35-35b-a3b", depth, 100)
