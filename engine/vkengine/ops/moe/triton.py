"""Mixture of experts at 1 to 8 rows as three launches.

1. ``route_kernel``: the router's rows (all experts and the shared expert's gate, fp32 logits), and
   beside them the shared expert's gate/up, which does not depend on the routing. The last of the
   router's programs picks the experts of every row.
2. ``gate_up_kernel``: one program per (row, rank, tile); its row of the stream is two launches old
   and read before the wait, so that only the expert's id and weights are left.
3. ``down_kernel``: per (row, tile) the chosen experts in rank order, then the shared expert times
   its gate, then the residual, all in fp32 in one accumulator per lane and one tree at the end. Ids
   are two launches old: all weights are asked for before the wait for gate/up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkengine.models.layout import MoeWeights
from vkengine.ops.moe.triton_select import APART, select_experts
from vkengine.ops.triton_common import ask_for, hand_over, silu, sum8
from vkengine.ops.triton_config import ahead_bytes, chunk, hand_over_mode
from vkengine.ops.triton_gemv import partial_squares, swiglu_dot, tile_dot
from vkengine.ops.triton_launch import Stream, centred, counter, stream_of
from vkengine.rows import Rows, Workspace

#: Weight rows per program; they never change a bit. Warps decide the order of additions.
ROUTER_BN = 2
SHARED_BN = 4
GATE_UP_BN = 4
GATE_UP_WARPS = 4
DOWN_BN = 4
#: Programs of gate/up that ask for the next product: as many as find room beside the router.
AHEAD_PROGRAMS = tl.constexpr(128)


@triton.jit
def route_kernel(
    router_ptr,
    shared_up_ptr,
    x_ptr,
    norm_ptr,
    logits_ptr,
    ids_ptr,
    choice_ptr,
    weights_ptr,
    shared_ptr,
    act_ptr,
    counter_ptr,
    eps,
    R: tl.constexpr,
    LANES: tl.constexpr,
    K: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    E: tl.constexpr,
    TOPK: tl.constexpr,
    BE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    n_router = (E + 1 + BE - 1) // BE
    if pid < n_router:
        e_rows = pid * BE + tl.arange(0, BE)
        live = e_rows < E + 1
        y = tile_dot(
            router_ptr, e_rows, live, x_ptr, norm_ptr, eps, R, K, BE, BK, 1, P, PP, WAIT=PDL
        )
        for r in tl.static_range(R):
            tl.store(logits_ptr + r * (E + 1) + e_rows, y[r], mask=live)
        tl.debug_barrier()
        done = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
        if done == n_router - 1:
            tl.store(counter_ptr, 0)
            select_experts(
                logits_ptr, ids_ptr, choice_ptr, weights_ptr, shared_ptr, R, LANES, E, TOPK
            )
    else:
        tile = pid - n_router
        rows = tile * BN + tl.arange(0, BN)
        v = swiglu_dot(
            shared_up_ptr, tile, I, x_ptr, norm_ptr, eps, R, K, BN, BK, P, PP, PDL, 16384
        )
        for r in tl.static_range(R):
            out = act_ptr + (r * (TOPK + 1) + TOPK) * I + rows
            tl.store(out, v[r].to(act_ptr.dtype.element_ty), mask=rows < I)


@triton.jit
def gate_up_kernel(
    gate_up_ptr,
    x_ptr,
    norm_ptr,
    choice_ptr,
    act_ptr,
    next_ptr,
    eps,
    n_pairs,
    K: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    TOPK: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    if AHEAD > 0 and pid < AHEAD_PROGRAMS:
        # Memory is idle from here until the choice is made and the experts are asked for.
        ask_for(next_ptr, pid, AHEAD)
    tile = pid // n_pairs
    pair = pid % n_pairs
    row = pair // TOPK
    rank = pair % TOPK
    k = tl.arange(0, BK)
    xs = ()
    for c in tl.static_range(K // BK):
        xs = xs + (tl.load(x_ptr + row * K + c * BK + k),)
    squares = partial_squares(norm_ptr, row, P, PP)
    # Not the end of the router's launch, only the choice itself is waited for: its programs all run
    # by the time one of these does.
    expert = tl.load(choice_ptr + pair * APART, volatile=True) - 1
    while expert < 0:
        expert = tl.load(choice_ptr + pair * APART, volatile=True) - 1
    i = tl.arange(0, 2 * BN)
    n = tile * BN + i // 2
    rows = n + (i % 2) * I
    w = gate_up_ptr + expert.to(tl.int64) * (2 * I * K) + rows[:, None] * K + k[None, :]
    tiles = ()
    for c in tl.static_range(K // BK):
        tiles = tiles + (
            tl.load(w + c * BK, mask=(n < I)[:, None], other=0.0, eviction_policy="evict_first"),
        )
    # After the loads: the compiler moves none of them across it, and so asks for all at once.
    hand_over(PDL)
    acc = tl.zeros([2 * BN, BK // 8], tl.float32)
    for c in tl.static_range(K // BK):
        x = xs[c].to(tl.float32)
        acc += sum8(tiles[c].to(tl.float32) * x[None, :], 2 * BN, BK)
    y = tl.sum(acc, axis=1) * tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    gate, up = tl.split(tl.reshape(y, (BN, 2)))
    out = tile * BN + tl.arange(0, BN)
    target = act_ptr + (row * (TOPK + 1) + rank) * I + out
    tl.store(target, (silu(gate) * up).to(act_ptr.dtype.element_ty), mask=out < I)


@triton.jit
def down_kernel(
    down_ptr,
    act_ptr,
    ids_ptr,
    choice_ptr,
    weights_ptr,
    shared_ptr,
    gain_ptr,
    h_ptr,
    hx_ptr,
    squares_ptr,
    R,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    E: tl.constexpr,
    TOPK: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    r = pid % R
    rows = (pid // R) * BN + tl.arange(0, BN)
    mask = rows < H
    k = tl.arange(0, BK)
    offs = rows[:, None] * I + k[None, :]
    act = act_ptr + r * ((TOPK + 1) * I)
    # All ids, then all weights, then the rest: no load waits for another that it does not need.
    experts = ()
    factors = ()
    for j in tl.static_range(TOPK):
        experts = experts + (tl.load(ids_ptr + r * TOPK + j).to(tl.int64),)
    for j in tl.static_range(TOPK):
        factors = factors + (tl.load(weights_ptr + r * TOPK + j),)
    experts = experts + (tl.full([], E, tl.int64),)
    factors = factors + (tl.load(shared_ptr + r),)
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
    gain = tl.load(gain_ptr + rows, mask=mask, other=0.0).to(tl.float32) + 1.0
    hand_over(PDL)
    if pid < R:
        # Every program that waited for this choice has ended: ready for the next layer's.
        ranks = tl.arange(0, TOPK_PADDED)
        tl.store(choice_ptr + (pid * TOPK + ranks) * APART, 0, mask=ranks < TOPK)
    acc = tl.zeros([BN, BK // 8], tl.float32)
    for j in tl.static_range(TOPK + 1):
        for c in tl.static_range(I // BK):
            x = tl.load(act + j * I + c * BK + k).to(tl.float32) * factors[j]
            acc += sum8(tiles[j * (I // BK) + c].to(tl.float32) * x[None, :], BN, BK)
    v = before + tl.sum(acc, axis=1)
    tl.store(h_ptr + r * H + rows, v, mask=mask)
    tl.store(hx_ptr + r * H + rows, (v * gain).to(hx_ptr.dtype.element_ty), mask=mask)
    part = (pid // R) * (BN // GROUP) + tl.arange(0, BN // GROUP)
    squares = tl.sum(tl.reshape(v * v, (BN // GROUP, GROUP)), axis=1)
    tl.store(squares_ptr + r * (H // GROUP) + part, squares, mask=part < H // GROUP)


def run(
    stream: Stream, w: MoeWeights, ws: Workspace, gain: Tensor, after: Tensor | None = None
) -> None:
    """``stream += moe(norm(stream))``; ``gain``: of the norm that reads the stream next, ``after``:
    the product that does."""
    c = w.config
    rows, hidden = stream.h.shape
    e, k, width = c.num_experts, c.experts_per_token, c.expert_size
    if w.shared_gate_up is not None:
        raise ValueError("moe: the kernels need a shared expert as wide as the routed ones")
    dtype = w.gate_up.dtype
    pdl = hand_over_mode(stream.h.device)
    ahead = ahead_bytes(after, AHEAD_PROGRAMS.value, pdl)
    parts = stream.squares.shape[1]
    padded = triton.next_power_of_2(parts)
    max_rows = 8
    for first in range(0, rows, max_rows):
        r = min(max_rows, rows - first)
        part = slice(first, first + r)
        logits = ws.get("moe.logits", (r, e + 1))
        ids = ws.get("moe.ids", (r, k), torch.int32)
        choice = counter(ws, "moe.choice", r * k * APART.value)
        weights = ws.get("moe.weights", (r, k))
        shared = ws.get("moe.shared", (r,))
        act = ws.get("moe.act", (r * (k + 1), width), dtype)
        be, bn = ROUTER_BN, SHARED_BN if r <= 4 else 2
        x, squares = stream.hx[part], stream.squares[part]
        route_kernel[(triton.cdiv(e + 1, be) + triton.cdiv(width, bn),)](
            w.router,
            w.gate_up[e],
            x,
            squares,
            logits,
            ids,
            choice,
            weights,
            shared,
            act,
            counter(ws, "moe", 1),
            eps=c.rms_eps,
            R=r,
            LANES=max(4, triton.next_power_of_2(r)),
            K=hidden,
            I=width,
            E=e,
            TOPK=k,
            BE=be,
            BN=bn,
            BK=chunk(hidden, 4),
            P=parts,
            PP=padded,
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl > 0,
        )
        gate_up_kernel[(triton.cdiv(width, GATE_UP_BN) * r * k,)](
            w.gate_up,
            x,
            squares,
            choice,
            act,
            after if after is not None else w.router,
            c.rms_eps,
            r * k,
            K=hidden,
            I=width,
            TOPK=k,
            BN=GATE_UP_BN,
            BK=chunk(hidden, GATE_UP_WARPS),
            P=parts,
            PP=padded,
            AHEAD=ahead,
            PDL=pdl,
            num_warps=GATE_UP_WARPS,
            launch_pdl=pdl > 0,
        )
        warps = max(1, min(4, width // 256))
        down_kernel[(triton.cdiv(hidden, DOWN_BN) * r,)](
            w.down,
            act,
            ids,
            choice,
            weights,
            shared,
            gain,
            stream.h[part],
            stream.hx[part],
            squares,
            R=r,
            H=hidden,
            I=width,
            E=e,
            TOPK=k,
            BN=DOWN_BN,
            BK=chunk(width, warps),
            GROUP=hidden // parts,
            TOPK_PADDED=triton.next_power_of_2(k),
            PDL=hand_over_mode(stream.h.device, early=True),
            num_warps=warps,
            launch_pdl=pdl > 0,
        )


def moe(h: Tensor, w: MoeWeights, state: None, rows: Rows, ws: Workspace) -> None:
    """Add the layer's output to ``h [R, H]``; see reference.py."""
    dtype = w.gate_up.dtype
    run(stream_of(h, w.norm, dtype, ws), w, ws, centred(ws, w.norm, dtype))
