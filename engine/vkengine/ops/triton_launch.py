"""What the block launchers share: the residual stream, prefetch requests, cached gains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from vkengine.ops import triton_config
from vkengine.ops.triton_config import SLICE, gemv_config
from vkengine.ops.triton_gemv import gemv_kernel
from vkengine.rows import Rows, Workspace


@dataclass(slots=True)
class Stream:
    """The residual stream of R rows and its copy in the weights' type, which the norms read."""

    h: Tensor  # [R, H] f32
    hx: Tensor  # [R, H] weight dtype


@dataclass(slots=True)
class Prefetch:
    """The first ``n_bytes`` of the weights that the next kernels read."""

    weight: Tensor
    n_bytes: int

    @staticmethod
    def of(weight: Tensor | None, megabytes: float) -> Prefetch | None:
        if weight is None or megabytes <= 0 or weight.device.type == "cpu":
            return None
        total = weight.numel() * weight.element_size()
        return Prefetch(weight, min(total, int(megabytes * 2**20)))


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """Megabytes each kernel asks for on behalf of the next ones; 0 turns a request off."""

    mixer: float = 0.0  # of the in-projection, during the previous layer's last kernel
    out: float = 0.0  # of the out-projection, during recurrence or attention
    router: float = 0.0  # of router and shared expert, during the out-projection
    down: float = 0.0  # share of the chosen experts' down projections, during gate/up
    head: float = 0.0


def prefetch_args(pf: Prefetch | None, grid: int, threads: int, fallback: Tensor) -> dict:
    """Kernel arguments: the last programs of the grid take one slice of lines each."""
    if pf is None:
        return {"pf_ptr": fallback, "pf_bytes": 0, "pf_from": 0, "PF": False}
    slices = -(-pf.n_bytes // (threads * 128))
    first = max(grid - slices, 0)
    return {"pf_ptr": pf.weight, "pf_bytes": pf.n_bytes, "pf_from": first, "PF": True}


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
    gain: Tensor | None = None,
    squares: Tensor | None = None,
    head: int = 8,
    stream: Stream | None = None,
    add: bool = True,
    swiglu: bool = False,
    row: Tensor | None = None,
    source: Tensor | None = None,
    pf: Prefetch | None = None,
) -> None:
    """``out [R, N] = x [R, K] @ w.T``, or into ``stream`` (added, or stored when not ``add``).

    ``row [R]``: which rows of x (and of ``source``, the residual to add to) each output row takes;
    R is then its length. Rows beyond eight run in further launches of the same shape; each row's
    bits are its own.
    """
    rows, k = x.shape if row is None else (row.shape[0], x.shape[1])
    n = w.shape[0] // 2 if swiglu else w.shape[0]
    norm = 1 if gain is not None else 2 if squares is not None else 0
    tiles = squares.shape[-1] if squares is not None else 1
    pdl = triton_config.PDL and x.device.type != "cpu"
    for first in range(0, rows, 8):
        r = min(8, rows - first)
        config = gemv_config(n, k, r * (2 if swiglu else 1), head if norm == 2 else 0)
        grid = triton.cdiv(n, config.bn)
        part = slice(first, first + r)
        target = out[part] if out is not None else x
        gains = gain if norm == 1 else squares[part] if squares is not None else x
        gemv_kernel[(grid,)](
            w,
            x[part] if row is None else x,
            gains,
            target,
            (stream.h[part] if source is None else source) if stream else target,
            stream.h[part] if stream else target,
            stream.hx[part] if stream else x,
            row[part] if row is not None else x,
            N=n,
            y_stride=target.stride(0),
            eps=eps,
            R=r,
            K=k,
            BN=config.bn,
            BK=config.bk,
            NORM=norm,
            RESIDUAL=0 if stream is None else 1 if add else 2,
            SWIGLU=swiglu,
            HEAD=head,
            TILES=tiles,
            SLICE=min(SLICE, head),
            HAS_ROW=row is not None,
            AHEAD=config.ahead,
            PDL=pdl,
            THREADS=config.warps * 32,
            num_warps=config.warps,
            launch_pdl=pdl,
            **prefetch_args(pf, grid, config.warps * 32, x),
        )


def stream_of(h: Tensor, dtype: torch.dtype, ws: Workspace) -> Stream:
    """A stream over ``h`` for a block that is called by itself."""
    hx = ws.get("hx", (h.shape[0], h.shape[1]), dtype)
    hx.copy_(h)
    return Stream(h, hx)


def positions(rows: Rows) -> tuple[Tensor, Tensor]:
    """(slot, pos0) as the kernels take them."""
    return rows.slot, rows.pos0
