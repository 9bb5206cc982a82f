"""Mixture of experts over many rows: pairs of (row, rank) sorted by expert, tiles of one expert.

The plan stays on the device: a fixed upper bound of tiles is launched and those beyond the last
leave at once. Each pair's output is written by itself and the ranks are added in order, so no sum
depends on which pairs share a tile. Rows past ``count`` belong to no expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkengine.models.layout import MoeWeights
from vkengine.ops.linear import linear
from vkengine.ops.moe.reference import shared_matrices
from vkengine.ops.rowwise import norm, precision_of, swiglu
from vkengine.ops.triton_common import sigmoid, silu


@triton.jit(do_not_specialize=["count"])
def select_kernel(
    logits_ptr, ids_ptr, weights_ptr, gate_ptr, count,
    E: tl.constexpr, EP: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """Grid R: the TOPK largest logits, ties to the lowest id, softmax over the chosen; id E for
    rows past ``count``. NaN counts as minus infinity."""
    r = tl.program_id(0)
    e = tl.arange(0, EP)
    x = tl.load(logits_ptr + r.to(tl.int64) * (E + 1) + e, mask=e < E, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    left = e < E
    top = tl.max(x, axis=0)
    floor = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    raw = ()
    for j in tl.static_range(TOPK):
        best = tl.max(tl.where(left, x, float("-inf")), axis=0)
        chosen = tl.min(tl.where(left & (x == best), e, EP), axis=0)
        left = left & (e != chosen)
        weight = tl.where(best == top, 1.0, tl.exp(best - floor))
        total += weight
        raw = raw + (weight,)  # noqa: RUF005
        tl.store(ids_ptr + r * TOPK + j, tl.where(r < count, chosen, E))
    for j in tl.static_range(TOPK):
        tl.store(weights_ptr + r * TOPK + j, raw[j] / total)
    tl.store(gate_ptr + r, sigmoid(tl.load(logits_ptr + r.to(tl.int64) * (E + 1) + E)))


@triton.jit
def plan_kernel(
    offset_ptr, tile_ptr, tiles, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Grid: for tile t, its expert (E for none), its first pair and the expert's last + 1."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, EP)
    low = tl.load(offset_ptr + e, mask=e < E, other=0).to(tl.int32)
    high = tl.load(offset_ptr + e + 1, mask=e < E, other=0).to(tl.int32)
    need = (high - low + BM - 1) // BM
    done = tl.cumsum(need, axis=0)
    before = done[None, :] <= t[:, None]
    mine = tl.sum((before & (e < E)[None, :]).to(tl.int32), axis=1)
    here = e[None, :] == mine[:, None]
    first = tl.sum(tl.where(here, low[None, :] - (done - need)[None, :] * BM, 0), axis=1) + t * BM
    last = tl.sum(tl.where(here, high[None, :], 0), axis=1)
    live = t < tiles
    tl.store(tile_ptr + t, mine, mask=live)
    tl.store(tile_ptr + tiles + t, first, mask=live)
    tl.store(tile_ptr + 2 * tiles + t, last, mask=live)


@triton.jit
def gate_up_tiles(
    x_ptr, w_ptr, pair_ptr, tile_ptr, act_ptr, tiles,
    K: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOPK: tl.constexpr,  # noqa: E741
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (I / BN, tiles): ``act[sorted pair] = silu(gate x) * up x``."""
    t = tl.program_id(1)
    expert = tl.load(tile_ptr + t).to(tl.int64)
    if expert < E:
        m = tl.load(tile_ptr + tiles + t) + tl.arange(0, BM)
        live = m < tl.load(tile_ptr + 2 * tiles + t)
        row = tl.load(pair_ptr + m, mask=live, other=0) // TOPK
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        xs = x_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
        ws = w_ptr + expert * (2 * I * K) + n[None, :] * K + k[:, None]
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        for c in range(tl.cdiv(K, BK)):
            in_k = k < K - c * BK
            x = tl.load(xs + c * BK, mask=live[:, None] & in_k[None, :], other=0.0)
            real = (n < I)[None, :] & in_k[:, None]
            g = tl.load(ws + c * BK, mask=real, other=0.0)
            u = tl.load(ws + I * K + c * BK, mask=real, other=0.0)
            gate = tl.dot(x, g, gate, input_precision=PRECISION)
            up = tl.dot(x, u, up, input_precision=PRECISION)
        act = (silu(gate) * up).to(act_ptr.dtype.element_ty)
        to = act_ptr + m.to(tl.int64)[:, None] * I + n[None, :]
        tl.store(to, act, mask=live[:, None] & (n < I)[None, :])


@triton.jit
def down_tiles(
    act_ptr, w_ptr, pair_ptr, tile_ptr, out_ptr, tiles,
    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr,  # noqa: E741
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (H / BN, tiles): ``out[pair] = down act[sorted pair]``."""
    t = tl.program_id(1)
    expert = tl.load(tile_ptr + t).to(tl.int64)
    if expert < E:
        m = tl.load(tile_ptr + tiles + t) + tl.arange(0, BM)
        live = m < tl.load(tile_ptr + 2 * tiles + t)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        xs = act_ptr + m.to(tl.int64)[:, None] * I + k[None, :]
        ws = w_ptr + expert * (H * I) + n[None, :] * I + k[:, None]
        acc = tl.zeros([BM, BN], tl.float32)
        for c in range(tl.cdiv(I, BK)):
            in_k = k < I - c * BK
            x = tl.load(xs + c * BK, mask=live[:, None] & in_k[None, :], other=0.0)
            w = tl.load(ws + c * BK, mask=(n < H)[None, :] & in_k[:, None], other=0.0)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        pair = tl.load(pair_ptr + m, mask=live, other=0).to(tl.int64)
        to = out_ptr + pair[:, None] * H + n[None, :]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (n < H)[None, :])


@triton.jit(do_not_specialize=["count"])
def combine_kernel(
    h_ptr, out_ptr, weights_ptr, gate_ptr, shared_ptr, count,
    H: tl.constexpr, BH: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """Grid (count, tiles): ranks in order, then the shared expert, then the residual."""
    r = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BH + tl.arange(0, BH)
    mask = k < H
    acc = tl.zeros([BH], tl.float32)
    for j in tl.static_range(TOPK):
        y = tl.load(out_ptr + (r * TOPK + j) * H + k, mask=mask, other=0.0).to(tl.float32)
        acc += tl.load(weights_ptr + r * TOPK + j) * y
    shared = tl.load(shared_ptr + r * H + k, mask=mask, other=0.0)
    acc += tl.load(gate_ptr + r) * shared
    h = tl.load(h_ptr + r * H + k, mask=mask, other=0.0)
    tl.store(h_ptr + r * H + k, h + acc, mask=mask)


def tile_rows(pairs: int, experts: int) -> tuple[int, int]:
    """(rows per tile, warps) by the mean number of pairs an expert gets."""
    return (128, 8) if pairs >= 96 * experts else (64, 4)


def moe(h: Tensor, w: MoeWeights, count: int) -> None:
    """Add the layer's output to the first ``count`` rows of ``h [R, H]`` f32."""
    c = w.config
    r, hidden = h.shape
    e, top, i = c.num_experts, c.experts_per_token, c.expert_size
    device, dtype = h.device, w.gate_up.dtype
    precision = precision_of(dtype)
    x = norm(h, w.norm, c.rms_eps, dtype)
    logits = linear(x, w.router)
    ids = torch.empty(r * top, device=device, dtype=torch.int32)
    weights = torch.empty(r * top, device=device)
    gate = torch.empty(r, device=device)
    ep = triton.next_power_of_2(e)
    select_kernel[(r,)](
        logits, ids, weights, gate, count, E=e, EP=ep, TOPK=top, num_warps=1
    )  # fmt: skip
    ordered, pair = torch.sort(ids, stable=True)
    edges = torch.arange(e + 1, device=device, dtype=torch.int32)
    offset = torch.searchsorted(ordered, edges, out_int32=True)
    bm, warps = tile_rows(r * top, e)
    tiles = r * top // bm + e
    tile = torch.empty(3 * tiles, device=device, dtype=torch.int32)
    plan_kernel[(triton.cdiv(tiles, 32),)](offset, tile, tiles, E=e, EP=ep, BM=bm, BT=32)
    act = torch.empty(r * top, i, device=device, dtype=dtype)
    small = dtype == torch.float32
    bn, bk = (32, 32) if small else (64, 64)
    stages = 2 if small else 4 if bm == 64 else 3
    gate_up_tiles[(triton.cdiv(i, bn), tiles)](
        x, w.gate_up, pair, tile, act, tiles, K=hidden, I=i, E=e, TOPK=top,
        BM=bm, BN=bn, BK=bk, PRECISION=precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    out = torch.empty(r * top, hidden, device=device, dtype=dtype)
    bn = 32 if small else 128
    down_tiles[(triton.cdiv(hidden, bn), tiles)](
        act, w.down, pair, tile, out, tiles, H=hidden, I=i, E=e,
        BM=bm, BN=bn, BK=bk, PRECISION=precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    shared_up, shared_down = shared_matrices(w)
    shared = linear(swiglu(linear(x, shared_up), dtype), shared_down)
    bh = min(1024, triton.next_power_of_2(hidden))
    combine_kernel[(count, triton.cdiv(hidden, bh))](
        h, out, weights, gate, shared, count, H=hidden, BH=bh, TOPK=top, num_warps=4
    )
