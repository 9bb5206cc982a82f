"""Mixture of experts at 1 to 64 rows as three launches.

1. ``route_kernel``: RMSNorm + router rows (all experts and the shared expert's gate, fp32 logits);
   the last program to finish picks the top k per row (ties to the lowest id), renormalises, and
   writes the (row, rank) pairs sorted by expert. Programs beyond the router's run the shared
   expert's gate/up in the shadow of the router's latency: it does not depend on the routing.
2. ``gate_up_kernel``: one program per (pair, tile); pairs that share an expert run side by side, so
   the second reads it from L2 and each row's arithmetic stays that of a lone row.
3. ``down_kernel``: per (row, tile) the chosen experts in rank order, then the shared expert times
   its gate, then the residual, all in fp32 in one accumulator per lane and one tree at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vkengine.models.layout import MoeWeights
from vkengine.ops import triton_config
from vkengine.ops.triton_common import prefetch_l2, prefetch_tail, sigmoid, sum8
from vkengine.ops.triton_config import chunk
from vkengine.ops.triton_gemv import swiglu_dot, tile_dot
from vkengine.ops.triton_launch import (
    Prefetch,
    Stream,
    centred,
    counter,
    prefetch_args,
    stream_of,
)
from vkengine.rows import Rows, Workspace

#: Weight rows per program; they never change a bit. Warps decide the order of additions.
ROUTER_BN = 2
SHARED_BN = 4
GATE_UP_BN = 4
GATE_UP_WARPS = 2
DOWN_BN = 4


@triton.jit
def select_experts(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    shared_ptr,
    sorted_ptr,
    R: tl.constexpr,
    RP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    TOPK: tl.constexpr,
    TP: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Top-k per row from the finished logits, and the pairs in order of their expert."""
    r = tl.arange(0, RP)
    e = tl.arange(0, EP)
    mask = (r[:, None] < R) & (e[None, :] < E)
    logits = tl.load(
        logits_ptr + r[:, None] * (E + 1) + e[None, :],
        mask=mask,
        other=float("-inf"),
        cache_modifier=".cg",
    )
    gate = tl.load(logits_ptr + r * (E + 1) + E, mask=r < R, other=0.0, cache_modifier=".cg")
    # NaN counts as minus infinity: ids stay valid whatever the input.
    logits = tl.where(logits == logits, logits, float("-inf"))
    # An order-preserving integer of the logit above the complement of the id: the maximum is the
    # largest logit with the lowest id.
    bits = logits.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    keys = (ordered << 32) | (EP - 1 - e)[None, :].to(tl.int64)
    keys = tl.where((e < E)[None, :], keys, -0x7FFFFFFFFFFFFFFF - 1)
    top = tl.max(logits, axis=1)
    floor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([RP], tl.float32)
    j = tl.arange(0, TP)
    ids = tl.zeros([RP, TP], tl.int32)
    weights = tl.zeros([RP, TP], tl.float32)
    for i in tl.static_range(TOPK):
        best = tl.max(keys, axis=1)
        expert = (EP - 1) - (best & 0xFFFFFFFF).to(tl.int32)
        high = (best >> 32).to(tl.int32)
        value = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
        weight = tl.where(value == top, 1.0, tl.exp(value - floor))
        total += weight
        keys = tl.where(keys == best[:, None], -0x7FFFFFFFFFFFFFFF - 1, keys)
        ids = tl.where(j[None, :] == i, expert[:, None], ids)
        weights = tl.where(j[None, :] == i, weight[:, None], weights)
    weights = weights / total[:, None]
    out = r[:, None] * TOPK + j[None, :]
    tl.store(ids_ptr + out, ids, mask=(r[:, None] < R) & (j[None, :] < TOPK))
    tl.store(weights_ptr + out, weights, mask=(r[:, None] < R) & (j[None, :] < TOPK))
    tl.store(shared_ptr + r, sigmoid(gate), mask=r < R)
    # Each pair's place among all pairs by (expert, pair); for one row its rank will do.
    pair = r[:, None] * TOPK + j[None, :]
    valid = (r[:, None] < R) & (j[None, :] < TOPK)
    code = tl.where(valid, ids * PAIRS + pair, 0x7FFFFFFF)
    if R == 1:
        tl.store(sorted_ptr + pair, code, mask=valid)
    else:
        flat = tl.reshape(code, (RP * TP,))
        place = tl.sum((flat[None, :] < flat[:, None]).to(tl.int32), axis=1)
        tl.store(sorted_ptr + place, flat, mask=flat < 0x7FFFFFFF)


@triton.jit
def route_kernel(
    router_ptr,
    shared_up_ptr,
    x_ptr,
    gain_ptr,
    logits_ptr,
    ids_ptr,
    weights_ptr,
    shared_ptr,
    sorted_ptr,
    act_ptr,
    counter_ptr,
    pf_ptr,
    pf_bytes,
    pf_from,
    eps,
    R: tl.constexpr,
    RP: tl.constexpr,
    K: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    E: tl.constexpr,
    EP: tl.constexpr,
    TOPK: tl.constexpr,
    TP: tl.constexpr,
    PAIRS: tl.constexpr,
    BE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PF: tl.constexpr,
    PDL: tl.constexpr,
    THREADS: tl.constexpr,
):
    pid = tl.program_id(0)
    n_router = (E + 1 + BE - 1) // BE
    if PF:
        prefetch_tail(pid, pf_ptr, pf_bytes, pf_from, THREADS)
    if pid < n_router:
        e_rows = pid * BE + tl.arange(0, BE)
        live = e_rows < E + 1
        y = tile_dot(router_ptr, e_rows, live, x_ptr, gain_ptr, eps, R, K, BE, BK, 1, 8, 1, PDL)
        for r in tl.static_range(R):
            tl.store(logits_ptr + r * (E + 1) + e_rows, y[r], mask=live)
        tl.debug_barrier()
        done = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
        if done == n_router - 1:
            tl.store(counter_ptr, 0)
            select_experts(
                logits_ptr,
                ids_ptr,
                weights_ptr,
                shared_ptr,
                sorted_ptr,
                R,
                RP,
                E,
                EP,
                TOPK,
                TP,
                PAIRS,
            )
    else:
        rows = (pid - n_router) * BN + tl.arange(0, BN)
        mask = rows < I
        v = swiglu_dot(
            shared_up_ptr, pid - n_router, I, x_ptr, gain_ptr, eps, R, K, BN, BK, 1, PDL, 16384
        )
        for r in tl.static_range(R):
            out = act_ptr + (r * (TOPK + 1) + TOPK) * I + rows
            tl.store(out, v[r].to(act_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gate_up_kernel(
    gate_up_ptr,
    x_ptr,
    gain_ptr,
    sorted_ptr,
    act_ptr,
    down_ptr,
    eps,
    n_pairs,
    K: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    TOPK: tl.constexpr,
    PAIRS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PF_FROM: tl.constexpr,
    PDL: tl.constexpr,
    THREADS: tl.constexpr,
):
    pid = tl.program_id(0)
    tile = pid // n_pairs
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    code = tl.load(sorted_ptr + pid % n_pairs)
    pair = code % PAIRS
    expert = (code // PAIRS).to(tl.int64)
    row = pair // TOPK
    rows = tile * BN + tl.arange(0, BN)
    mask = rows < I
    w = gate_up_ptr + expert * (2 * I * K)
    x = x_ptr + row * K
    if PF_FROM * BN < I:
        if tile >= PF_FROM:
            # Later tiles prefetch this expert's down projection: DRAM stays busy at the boundary.
            share: tl.constexpr = (I // BN - PF_FROM) * THREADS * 128
            units: tl.constexpr = (K * I * 2 + share - 1) // share
            prefetch_l2(
                down_ptr.to(tl.int64) + expert * (K * I * 2),
                (tile - PF_FROM).to(tl.int64) * (units * THREADS * 128),
                K * I * 2,
                THREADS,
                units,
            )
    v = swiglu_dot(w, tile, I, x, gain_ptr, eps, 1, K, BN, BK, 1, False, 8192)
    out = act_ptr + ((pair // TOPK) * (TOPK + 1) + pair % TOPK) * I + rows
    tl.store(out, v[0].to(act_ptr.dtype.element_ty), mask=mask)


@triton.jit
def down_kernel(
    down_ptr,
    act_ptr,
    ids_ptr,
    weights_ptr,
    shared_ptr,
    h_ptr,
    hx_ptr,
    pf_ptr,
    pf_bytes,
    pf_from,
    R,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    E: tl.constexpr,
    TOPK: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PF: tl.constexpr,
    PDL: tl.constexpr,
    THREADS: tl.constexpr,
):
    pid = tl.program_id(0)
    if PF:
        prefetch_tail(pid, pf_ptr, pf_bytes, pf_from, THREADS)
    r = pid % R
    rows = (pid // R) * BN + tl.arange(0, BN)
    mask = rows < H
    k = tl.arange(0, BK)
    offs = rows[:, None] * I + k[None, :]
    act = act_ptr + r * ((TOPK + 1) * I)
    # All ids, then all weights, then the rest: no load waits for another that it does not need.
    # The ids are two launches old, so complete: they may be read before the wait.
    experts = ()
    for j in tl.static_range(TOPK):
        experts = experts + (tl.load(ids_ptr + r * TOPK + j, cache_modifier=".cg").to(tl.int64),)
    experts = experts + (tl.full([], E, tl.int64),)
    tiles = ()
    for j in tl.static_range(TOPK + 1):
        base = down_ptr + experts[j] * (H * I)
        for c in tl.static_range(I // BK):
            tiles = tiles + (
                tl.load(
                    base + offs + c * BK,
                    mask=mask[:, None],
                    other=0.0,
                    eviction_policy="evict_first",
                ),
            )
    # The residual is two launches old as well.
    before = tl.load(h_ptr + r * H + rows, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BN, BK // 8], tl.float32)
    for j in tl.static_range(TOPK + 1):
        if j < TOPK:
            weight = tl.load(weights_ptr + r * TOPK + j)
        else:
            weight = tl.load(shared_ptr + r)
        for c in tl.static_range(I // BK):
            x = tl.load(act + j * I + c * BK + k).to(tl.float32) * weight
            acc += sum8(tiles[j * (I // BK) + c].to(tl.float32) * x[None, :], BN, BK)
    y = tl.sum(acc, axis=1)
    v = before + y
    tl.store(h_ptr + r * H + rows, v, mask=mask)
    tl.store(hx_ptr + r * H + rows, v.to(hx_ptr.dtype.element_ty), mask=mask)


def run(
    stream: Stream, w: MoeWeights, ws: Workspace, *, pf: Prefetch | None, down_share: float
) -> None:
    """``stream += moe(norm(stream))``; ``pf`` is prefetched by the last kernel, ``down_share`` of
    the down projections by the gate/up kernel's later tiles."""
    c = w.config
    rows, hidden = stream.h.shape
    e, k, width = c.num_experts, c.experts_per_token, c.expert_size
    if w.shared_gate_up is not None:
        raise ValueError("moe: the kernels need a shared expert as wide as the routed ones")
    dtype = w.gate_up.dtype
    gain = centred(ws, w.norm, dtype)
    bk = chunk(hidden, 4)
    pdl = triton_config.PDL and stream.h.device.type != "cpu"
    max_rows = 8
    for first in range(0, rows, max_rows):
        r = min(max_rows, rows - first)
        part = slice(first, first + r)
        n_pairs = r * k
        pairs = max(16, triton.next_power_of_2(n_pairs))
        logits = ws.get("moe.logits", (r, e + 1))
        ids = ws.get("moe.ids", (r, k), torch.int32)
        weights = ws.get("moe.weights", (r, k))
        shared = ws.get("moe.shared", (r,))
        order = ws.get("moe.order", (n_pairs,), torch.int32)
        act = ws.get("moe.act", (r * (k + 1), width), dtype)
        be, bn = ROUTER_BN, SHARED_BN if r <= 4 else 2
        x = stream.hx[part]
        grid = triton.cdiv(e + 1, be) + triton.cdiv(width, bn)
        route_kernel[(grid,)](
            w.router,
            w.gate_up[e],
            x,
            gain,
            logits,
            ids,
            weights,
            shared,
            order,
            act,
            counter(ws, "moe", 1),
            eps=c.rms_eps,
            R=r,
            RP=triton.next_power_of_2(r),
            K=hidden,
            I=width,
            E=e,
            EP=triton.next_power_of_2(e),
            TOPK=k,
            TP=triton.next_power_of_2(k),
            PAIRS=pairs,
            BE=be,
            BN=bn,
            BK=bk,
            PDL=pdl,
            THREADS=128,
            num_warps=4,
            launch_pdl=pdl,
            **prefetch_args(None, grid, 128, x),
        )
        bn = GATE_UP_BN
        tiles = triton.cdiv(width, bn)
        late = tiles if down_share <= 0 or x.device.type == "cpu" else int(tiles * (1 - down_share))
        gate_up_kernel[(tiles * n_pairs,)](
            w.gate_up,
            x,
            gain,
            order,
            act,
            w.down,
            c.rms_eps,
            n_pairs,
            K=hidden,
            I=width,
            TOPK=k,
            PAIRS=pairs,
            BN=bn,
            BK=chunk(hidden, GATE_UP_WARPS),
            PF_FROM=min(late, tiles - 1) if late < tiles else tiles,
            PDL=pdl,
            THREADS=GATE_UP_WARPS * 32,
            num_warps=GATE_UP_WARPS,
            launch_pdl=pdl,
        )
        bn = DOWN_BN
        warps = max(1, min(4, width // 256))
        grid = triton.cdiv(hidden, bn) * r
        down_kernel[(grid,)](
            w.down,
            act,
            ids,
            weights,
            shared,
            stream.h[part],
            stream.hx[part],
            R=r,
            H=hidden,
            I=width,
            E=e,
            TOPK=k,
            BN=bn,
            BK=chunk(width, warps),
            PDL=pdl,
            THREADS=warps * 32,
            num_warps=warps,
            launch_pdl=pdl,
            **prefetch_args(pf if first + r == rows else None, grid, warps * 32, x),
        )


def moe(h: Tensor, w: MoeWeights, state: None, rows: Rows, ws: Workspace) -> None:
    """Add the layer's output to ``h [R, H]``; see reference.py."""
    run(stream_of(h, w.gate_up.dtype, ws), w, ws, pf=None, down_share=0.0)
