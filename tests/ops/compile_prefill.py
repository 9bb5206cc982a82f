"""Compile every kernel of a prompt's chunk for a GPU that is not there: see compile_round.py.

`python tests/ops/compile_prefill.py MODEL ROWS ARCH`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from compile_round import Catcher
from triton.runtime.jit import JITFunction


def compile_prefill(model: str, rows: int, arch: int) -> list[dict[str, Any]]:
    from vkengine.checkpoint import Builder, rotary_tables
    from vkengine.config import KNOWN_SHAPES
    from vkengine.gpu_prefill import Prefill
    from vkengine.rows import Workspace
    from vkengine.state import State

    kinds = ("gdn", "attention")
    config = replace(KNOWN_SHAPES[model], num_layers=len(kinds), layer_types=kinds)
    meta = torch.device("meta")

    def source(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, device=meta, dtype=torch.bfloat16)

    cos, sin = rotary_tables(config, 4096, meta)
    weights = Builder(config, source, meta, torch.bfloat16, cos, sin).model("model.", True)
    state = State(config, 1, 2048, meta, torch.bfloat16, True)
    catcher = Catcher(arch)
    original = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        catcher.run(self, *args, grid=grid, warmup=warmup, **kwargs)

    JITFunction.run = run  # type: ignore[method-assign]
    try:
        tokens = torch.empty(rows + 1, dtype=torch.int32, device=meta)
        Prefill(weights, state, Workspace(meta)).prompt(0, tokens, 0, rows)
    finally:
        JITFunction.run = original  # type: ignore[method-assign]
    return list(catcher.seen.values())


if __name__ == "__main__":
    found = compile_prefill(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps(found))  # noqa: T201
