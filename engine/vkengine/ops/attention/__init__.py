"""Dispatch by device: Triton on a GPU, packed torch on a CPU."""

from __future__ import annotations

from torch import Tensor

from vkengine.models.layout import AttentionWeights
from vkengine.rows import Rows, Workspace
from vkengine.state import AttentionState

from . import cpu, reference


def attention(
    h: Tensor, w: AttentionWeights, state: AttentionState, rows: Rows, ws: Workspace
) -> None:
    """Add the layer's output to the residual stream ``h [R, H]`` f32; see reference.py."""
    if h.is_cuda:
        from .triton import attention as run
    elif w.packed is not None:
        run = cpu.attention
    else:
        run = reference.attention
    run(h, w, state, rows, ws)
