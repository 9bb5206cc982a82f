"""Dense gated feed-forward: two row-streaming products, SiLU in the first's epilogue."""

from __future__ import annotations

from torch import Tensor

from vkengine.models.layout import MlpWeights
from vkengine.ops.triton_launch import Stream, centred, gemv, stream_of
from vkengine.rows import Rows, Workspace


def run(stream: Stream, w: MlpWeights, ws: Workspace, gain: Tensor) -> None:
    """``stream += down(silu(gate x) * up x)`` with ``x = norm(stream)``; ``gain``: of the norm that
    reads the stream next."""
    r = stream.h.shape[0]
    act = ws.get("mlp.act", (r, w.gate_up.shape[0] // 2), w.gate_up.dtype)
    gemv(w.gate_up, stream.hx, act, eps=w.config.rms_eps, norm=stream.squares, swiglu=True)
    gemv(w.down, act, None, stream=stream, gain=gain)


def mlp(h: Tensor, w: MlpWeights, state: None, rows: Rows, ws: Workspace) -> None:
    """Add the layer's output to ``h [R, H]``; see reference.py."""
    dtype = w.gate_up.dtype
    run(stream_of(h, w.norm, dtype, ws), w, ws, centred(ws, w.norm, dtype))
