"""Dense gated feed-forward: two row-streaming products, SiLU in the first's epilogue."""

from __future__ import annotations

from torch import Tensor

from vkengine.models.layout import MlpWeights
from vkengine.ops.triton_launch import Prefetch, Stream, centred, gemv, stream_of
from vkengine.rows import Rows, Workspace


def run(stream: Stream, w: MlpWeights, ws: Workspace, *, pf: Prefetch | None) -> None:
    """``stream += down(silu(gate x) * up x)`` with ``x = norm(stream)``."""
    r = stream.h.shape[0]
    dtype = w.gate_up.dtype
    act = ws.get("mlp.act", (r, w.gate_up.shape[0] // 2), dtype)
    gain = centred(ws, w.norm, dtype)
    gemv(w.gate_up, stream.hx, act, eps=w.config.rms_eps, gain=gain, swiglu=True)
    gemv(w.down, act, None, stream=stream, pf=pf)


def mlp(h: Tensor, w: MlpWeights, state: None, rows: Rows, ws: Workspace) -> None:
    """Add the layer's output to ``h [R, H]``; see reference.py."""
    run(stream_of(h, w.gate_up.dtype, ws), w, ws, pf=None)
