"""Dispatch by device: Triton on a GPU, packed torch on a CPU."""

from __future__ import annotations

from torch import Tensor

from vkengine.models.layout import MoeWeights
from vkengine.rows import Rows, Workspace

from . import cpu, reference


def moe(h: Tensor, w: MoeWeights, state: None, rows: Rows | None, ws: Workspace) -> None:
    """Add the layer's output to the residual stream ``h [R, H]`` f32; see reference.py."""
    if h.is_cuda:
        from .triton import moe as run_triton

        assert rows is not None, "prefill units do not come here on a GPU"
        run_triton(h, w, state, rows, ws)
        return
    run = cpu.moe if w.packed is not None else reference.moe
    run(h, w, state, rows, ws)
