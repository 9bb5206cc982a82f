"""Dispatch by device: Triton on a GPU, packed torch on a CPU."""

from __future__ import annotations

from torch import Tensor

from ...models.layout import MlpWeights
from ...rows import Rows, Workspace
from . import cpu, reference


def mlp(h: Tensor, w: MlpWeights, state: None, rows: Rows, ws: Workspace) -> None:
    """Add the layer's output to the residual stream ``h [R, H]`` f32; see reference.py."""
    if h.is_cuda:
        from .triton import mlp as run
    elif w.packed is not None:
        run = cpu.mlp
    else:
        run = reference.mlp
    run(h, w, state, rows, ws)
