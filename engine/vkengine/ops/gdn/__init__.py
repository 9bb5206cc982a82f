"""Dispatch by device: Triton on a GPU, packed torch on a CPU."""

from __future__ import annotations

from torch import Tensor

from vkengine.models.layout import GdnWeights
from vkengine.rows import Rows, Workspace
from vkengine.state import GdnState

from . import cpu, reference


def gdn(h: Tensor, w: GdnWeights, state: GdnState, rows: Rows, ws: Workspace) -> None:
    """Add the layer's output to the residual stream ``h [R, H]`` f32; see reference.py."""
    if h.is_cuda:
        from .triton import gdn as run
    elif w.packed is not None:
        run = cpu.gdn
    else:
        run = reference.gdn
    run(h, w, state, rows, ws)
