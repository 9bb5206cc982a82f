"""What the block launchers share: the residual stream, cached gains, the product's launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from vkengine.ops.triton_config import SLICE, gemv_config, hand_over_mode, tensor_cores
from vkengine.ops.triton_gemv import gemv_kernel
from vkengine.rows import Workspace


@dataclass(slots=True)
class Stream:
    """The residual stream of R rows, and what the norm that reads it next needs.

    ``hx`` is ``h * gain`` of that norm, ``squares`` the sums of squares of neighbouring values.
    """

    h: Tensor  # [R, H] f32
    hx: Tensor  # [R, H] weight dtype
    squares: Tensor  # [R, H / group] f32


def group_of(hidden: int) -> int:
    """Neighbouring values in one partial sum of squares: no more than a program's outputs."""
    return 4 if hidden <= 4096 else 16


def centred(ws: Workspace, gain: Tensor, dtype: torch.dtype) -> Tensor:
    """``gain - 1`` in the weights' type (exact for a checkpoint's own gains), made once."""
    key = ("gain", gain.data_ptr(), dtype)
    if key not in ws.buffers:
        ws.buffers[key] = (gain - 1.0).to(dtype)
    return ws.buffers[key]


def counter(ws: Workspace, name: str, n: int) -> Tensor:
    """Arrival counters: zero when made, and left at zero by every kernel."""
    return ws.get("counter." + name, (n,), torch.int32)


def gemv(
    w: Tensor,
    x: Tensor,
    out: Tensor | None,
    *,
    eps: float = 0.0,
    norm: Tensor | None = None,
    squares: Tensor | None = None,
    head: int = 8,
    stream: Stream | None = None,
    gain: Tensor | None = None,
    add: bool = True,
    swiglu: bool = False,
    row: Tensor | None = None,
    source: Tensor | None = None,
    early: bool = False,
) -> None:
    """``out [R, N] = x [R, K] @ w.T``, or into ``stream`` (added, or stored when not ``add``).

    ``norm``: the stream's partial squares, when x is a stream's ``hx``. ``squares``: those of a
    gated norm, per head. ``gain``: of the norm that reads ``stream`` next, centred. ``row [R]``:
    which rows of x (and of ``source``, the residual to add to) each output row takes; R is then its
    length. ``early``: the next kernel reads nothing but weights before its wait; that is always so
    after a product that writes a stream or is ``swiglu``. Rows beyond eight run in further launches
    of the same shape; a row's bits are its own.
    """
    rows, k = x.shape if row is None else (row.shape[0], x.shape[1])
    n = w.shape[0] // 2 if swiglu else w.shape[0]
    kind = 1 if norm is not None else 2 if squares is not None else 0
    p = norm.shape[-1] if norm is not None else 1
    tiles = squares.shape[-1] if squares is not None else 1
    pdl = hand_over_mode(x.device, early or swiglu or stream is not None)
    nothing = x
    if stream is not None:
        assert gain is not None, "a stream's writer prepares the norm that reads it"
    for first in range(0, rows, 8):
        r = min(8, rows - first)
        config = gemv_config(w.shape[0], k, r, head if kind == 2 else 0, tensor_cores(w))
        grid = triton.cdiv(n, config.bn // 2 if swiglu else config.bn)
        part = slice(first, first + r)
        target = out[part] if out is not None else nothing
        sums = norm if norm is not None else squares
        if sums is not None and row is None:
            sums = sums[part]
        gemv_kernel[(grid,)](
            w,
            x[part] if row is None else x,
            sums if sums is not None else nothing,
            target,
            (stream.h[part] if source is None else source) if stream else nothing,
            stream.h[part] if stream else nothing,
            stream.hx[part] if stream else nothing,
            gain if gain is not None else nothing,
            stream.squares[part] if stream else nothing,
            row[part] if row is not None else nothing,
            N=n,
            y_stride=target.stride(0),
            eps=eps,
            R=r,
            K=k,
            BN=config.bn,
            BK=config.bk,
            S=config.slices,
            NORM=kind,
            P=p,
            PP=triton.next_power_of_2(p),
            RESIDUAL=0 if stream is None else 1 if add else 2,
            GROUP=n // stream.squares.shape[1] if stream is not None else 1,
            SWIGLU=swiglu,
            HEAD=head,
            TILES=tiles,
            SLICE=min(SLICE, head),
            HAS_ROW=row is not None,
            AHEAD=config.ahead,
            PDL=pdl,
            num_warps=config.warps,
            launch_pdl=pdl > 0,
        )


def stream_of(h: Tensor, gain: Tensor, dtype: torch.dtype, ws: Workspace) -> Stream:
    """A stream over ``h`` for a block that is called by itself and begins with this norm."""
    rows, hidden = h.shape
    group = group_of(hidden)
    hx = ws.get("hx", (rows, hidden), dtype)
    hx.copy_(h * (centred(ws, gain, dtype).float() + 1.0))
    squares = ws.get("squares", (rows, hidden // group))
    squares.copy_(h.square().unflatten(1, (-1, group)).sum(-1))
    return Stream(h, hx, squares)


def tensor(w: object) -> Tensor:
    """A GPU matrix is a plain tensor."""
    assert isinstance(w, Tensor)
    return w
