"""Gated full attention between its two projections, two launches.

Works on ``y [R, (2*NH + 2*NKV) * D]`` (per head query | gate, then keys, then values; fp32).

``split_kernel``: one program per (walker, group of rows, key head) walks fixed splits of ``SPLIT``
tokens at absolute boundaries. Keys and values older than the round are asked for before the launch
dependency is awaited; the round's own are normalised, rotated, put into the cache, and laid into
the tile where they belong. ``combine_kernel``: one program per (row, head, part of D) combines the
splits in a fixed order and applies the sigmoid gate.

A tile of queries always has the same shape (the heads of one key head, times as many rows as fill
16), so what a row computes depends on its position alone: never on M, on its neighbours, or on how
many walkers run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vkengine.models.layout import AttentionWeights
from vkengine.ops.triton_common import hand_over, sigmoid
from vkengine.ops.triton_config import hand_over_mode
from vkengine.ops.triton_launch import Stream, centred, gemv, stream_of
from vkengine.rows import Rows, Workspace
from vkengine.state import PAD, AttentionState

#: Tokens per chunk of a split, and programs that share the splits of some rows and a key head.
CHUNK = 32
WALKERS = 80
WARPS = 8
REGISTERS = 128
#: Columns of a head that one program combines, and splits it takes at once.
COMBINE_COLUMNS = 128
COMBINE_SPLITS = 64


def split_tokens(max_len: int) -> int:
    """Tokens per split: fixed by the longest sequence the state can hold."""
    return 32 if max_len <= 2560 else 64 if max_len <= 8192 else 256


@triton.jit
def partner_of(d, ROT: tl.constexpr):
    """The dimension that rotates with d (d itself beyond the rotated ones)."""
    half: tl.constexpr = ROT // 2
    return in_runs(tl.where(d < half, d + half, tl.where(d < ROT, d - half, d)), half)


@triton.jit
def in_runs(index, HALF: tl.constexpr):
    """Tells the compiler that an index made of d moves by runs of eight, where it does."""
    if HALF % 8 == 0:
        index = tl.max_contiguous(tl.multiple_of(index, 8), 8)
    return index


@triton.jit
def rotated(x, other, gain, other_gain, c, s, d, eps, D: tl.constexpr, ROT: tl.constexpr):
    """RMS norm over the last axis and rotation; ``other`` holds x at each partner dimension."""
    axis: tl.constexpr = len(x.shape) - 1
    inverse = tl.rsqrt(tl.sum(x * x, axis=axis) / D + eps)
    if axis == 1:
        inverse = inverse[:, None]
    x = x * inverse * gain
    other = other * inverse * other_gain
    return x * c + tl.where(d < ROT // 2, -other, other) * s


@triton.jit
def old_tile(k_ptr, v_ptr, cache, t, d, limit, STRIDE: tl.constexpr):
    """Keys and values of tokens ``t`` below ``limit``, zero elsewhere."""
    at = cache + t[:, None].to(tl.int64) * STRIDE + d[None, :]
    inside = (t < limit)[:, None]
    k = tl.load(k_ptr + at, mask=inside, other=0.0)
    v = tl.load(v_ptr + at, mask=inside, other=0.0)
    return k, v


@triton.jit
def split_kernel(
    y_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    pos_ptr,
    k_ptr,
    v_ptr,
    part_ptr,
    stat_ptr,
    y_stride,
    slot_tokens,
    eps,
    M: tl.constexpr,
    NH: tl.constexpr,
    NKV: tl.constexpr,
    D: tl.constexpr,
    ROT: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BT: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WALKERS: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B * GROUPS * WALKERS, NKV). ``GROUP``: heads of a key head, padded to a power of two;
    a program takes ``TILE / GROUP`` rows of one sequence."""
    pid = tl.program_id(0)
    kvh = tl.program_id(1)
    # Walkers last: those that a short context leaves idle come after all that work.
    share = tl.num_programs(0) // WALKERS
    walker = pid // share
    b = pid % share // GROUPS
    at_once: tl.constexpr = TILE // GROUP
    j0 = pid % GROUPS * at_once
    pos0 = tl.load(pos_ptr + b)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    group: tl.constexpr = NH // NKV
    half: tl.constexpr = ROT // 2
    scale: tl.constexpr = D**-0.5
    i = tl.arange(0, TILE)
    d = tl.arange(0, D)
    j = j0 + i // GROUP
    heads = kvh * group + i % GROUP
    mask = (i % GROUP < group) & (j < M)
    pos = pos0 + j
    last = pos0 + tl.minimum(j0 + at_once, M) - 1
    n_splits = last // SPLIT + 1
    if walker < n_splits:
        partner = partner_of(d, ROT)
        cache = (slot * slot_tokens * NKV + kvh) * D
        # Cursors, gains, angles and old tokens are more than one launch old; y is not.
        k, v = old_tile(k_ptr, v_ptr, cache, walker * SPLIT + tl.arange(0, BT), d, pos0, NKV * D)
        q_gain = tl.load(q_norm_ptr + d).to(tl.float32) + 1.0
        q_other_gain = tl.load(q_norm_ptr + partner).to(tl.float32) + 1.0
        turn = in_runs(d % half, half)
        angle = pos[:, None] * half + turn[None, :]
        turns = mask[:, None] & (d < ROT)[None, :]
        q_cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
        q_sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
        hand_over(PDL)
        q_at = y_ptr + (b * M + j).to(tl.int64)[:, None] * y_stride + heads[:, None] * (2 * D)
        q_raw = tl.load(q_at + d[None, :], mask=mask[:, None], other=0.0)
        q_other = tl.load(q_at + partner[None, :], mask=mask[:, None], other=0.0)
        q = rotated(
            q_raw,
            q_other,
            q_gain[None, :],
            q_other_gain[None, :],
            q_cos,
            q_sin,
            d[None, :],
            eps,
            D,
            ROT,
        ).to(k_ptr.dtype.element_ty)
        split = walker
        while split < n_splits:
            top = tl.full([TILE], float("-inf"), tl.float32)
            total = tl.zeros([TILE], tl.float32)
            acc = tl.zeros([D, TILE], tl.float32)
            for c in range(SPLIT // BT):
                t0 = split * SPLIT + c * BT
                t = t0 + tl.arange(0, BT)
                # The round's own tokens: whoever needs one works it out (the same bits everywhere)
                # and stores it, so that no program depends on another.
                for own in range(M):
                    p = pos0 + own
                    if (p >= t0) & (p < t0 + BT) & (p <= last):
                        y_own = y_ptr + (b * M + own).to(tl.int64) * y_stride + NH * 2 * D + kvh * D
                        k_raw = tl.load(y_own + d)
                        k_other = tl.load(y_own + partner)
                        v_own = tl.load(y_own + NKV * D + d).to(v_ptr.dtype.element_ty)
                        at_own = p * half + turn
                        k_own = rotated(
                            k_raw,
                            k_other,
                            tl.load(k_norm_ptr + d).to(tl.float32) + 1.0,
                            tl.load(k_norm_ptr + partner).to(tl.float32) + 1.0,
                            tl.load(cos_ptr + at_own, mask=d < ROT, other=1.0),
                            tl.load(sin_ptr + at_own, mask=d < ROT, other=0.0),
                            d,
                            eps,
                            D,
                            ROT,
                        ).to(k_ptr.dtype.element_ty)
                        into = cache + p.to(tl.int64) * (NKV * D) + d
                        tl.store(k_ptr + into, k_own)
                        tl.store(v_ptr + into, v_own)
                        here = (t == p)[:, None]
                        k = tl.where(here, k_own[None, :], k)
                        v = tl.where(here, v_own[None, :], v)
                # Tokens down, queries across: keys and values are then what the matrix units read
                # straight from shared memory, and no warp holds all queries in registers.
                s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
                s = tl.where(t[:, None] <= pos[None, :], s, float("-inf"))
                new_top = tl.maximum(top, tl.max(s, axis=0))
                # A chunk wholly beyond the row keeps the old maximum: no NaN from inf - inf.
                safe = tl.where(new_top == float("-inf"), 0.0, new_top)
                w = tl.exp(s - safe[None, :])
                fade = tl.exp(top - safe)
                total = total * fade + tl.sum(w, axis=0)
                acc = acc * fade[None, :] + tl.dot(
                    tl.trans(v), w.to(v_ptr.dtype.element_ty), input_precision="ieee"
                )
                top = new_top
                if SPLIT > BT or MAX_SPLITS > WALKERS:
                    # The next chunk of this split, or the first of this walker's next split.
                    ahead = tl.where(c + 1 < SPLIT // BT, t0 + BT, (split + WALKERS) * SPLIT)
                    after = ahead + tl.arange(0, BT)
                    k, v = old_tile(k_ptr, v_ptr, cache, after, d, pos0, NKV * D)
            at = ((b * M + j) * NH + heads) * MAX_SPLITS + split
            tl.store(part_ptr + at[None, :].to(tl.int64) * D + d[:, None], acc, mask=mask[None, :])
            tl.store(stat_ptr + at * 2, top, mask=mask)
            tl.store(stat_ptr + at * 2 + 1, total, mask=mask)
            split += WALKERS


@triton.jit
def combine_kernel(
    y_ptr,
    pos_ptr,
    part_ptr,
    stat_ptr,
    x_ptr,
    y_stride,
    M: tl.constexpr,
    NH: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    SP: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, NH, D / BD). Splits are added ``AT_ONCE`` by one tree, and these sums in order."""
    r = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    n_splits = (tl.load(pos_ptr + r // M) + r % M) // SPLIT + 1
    # The projection before the splits is two launches old.
    gate = tl.load(y_ptr + r.to(tl.int64) * y_stride + head * (2 * D) + D + d)
    first = (r * NH + head) * MAX_SPLITS
    every = tl.arange(0, SP)
    some = tl.arange(0, AT_ONCE)
    hand_over(PDL)
    tops = tl.load(stat_ptr + (first + every) * 2, mask=every < n_splits, other=float("-inf"))
    sums = tl.load(stat_ptr + (first + every) * 2 + 1, mask=every < n_splits, other=0.0)
    best = tl.max(tops, axis=0)
    total = tl.sum(tl.exp(tops - best) * sums, axis=0)
    acc = tl.zeros([BD], tl.float32)
    s0 = n_splits * 0
    while s0 < n_splits:
        s = s0 + some
        live = s < n_splits
        top = tl.load(stat_ptr + (first + s) * 2, mask=live, other=float("-inf"))
        at = (first + s)[:, None].to(tl.int64) * D + d[None, :]
        part = tl.load(part_ptr + at, mask=live[:, None], other=0.0)
        acc += tl.sum(part * tl.exp(top - best)[:, None], axis=0)
        s0 += AT_ONCE
    out = acc / total * sigmoid(gate)
    tl.store(x_ptr + r * (NH * D) + head * D + d, out.to(x_ptr.dtype.element_ty))


def run(
    stream: Stream,
    w: AttentionWeights,
    state: AttentionState,
    rows: Rows,
    ws: Workspace,
    gain: Tensor,
    *,
    row: Tensor | None = None,
    into: Stream | None = None,
) -> None:
    """``stream += attention(norm(stream))``; ``gain``: of the norm that reads the stream next.

    All rows enter the cache; with ``row`` [n] only those rows go on, into the stream ``into``.
    """
    c = w.config
    r = stream.h.shape[0]
    nh, nkv, d = c.num_heads, c.num_kv_heads, c.head_dim
    dtype = w.w_qkv.dtype
    width = w.w_qkv.shape[0]
    y = ws.get("attention.y", (r, width))
    gemv(w.w_qkv, stream.hx, y, eps=c.rms_eps, norm=stream.squares)
    length = state.k.shape[1]
    split = split_tokens(length - PAD)
    max_splits = -(-length // split)
    walkers = min(WALKERS, max_splits)
    heads = triton.next_power_of_2(nh // nkv)
    tile = max(16, heads)
    groups = triton.cdiv(rows.m, tile // heads)
    x = ws.get("attention.x", (r, nh * d), dtype)
    part = ws.get("attention.part", (r, nh, max_splits, d))
    stat = ws.get("attention.stat", (r, nh, max_splits, 2))
    pos = rows.pos0.contiguous()
    pdl = hand_over_mode(x.device)
    split_kernel[(r // rows.m * groups * walkers, nkv)](
        y,
        centred(ws, w.q_norm, dtype),
        centred(ws, w.k_norm, dtype),
        w.cos,
        w.sin,
        rows.slot.contiguous(),
        pos,
        state.k,
        state.v,
        part,
        stat,
        width,
        length,
        c.rms_eps,
        M=rows.m,
        NH=nh,
        NKV=nkv,
        D=d,
        ROT=c.rotary_dim,
        GROUP=heads,
        TILE=tile,
        BT=CHUNK,
        SPLIT=split,
        MAX_SPLITS=max_splits,
        WALKERS=walkers,
        GROUPS=groups,
        PDL=pdl,
        num_warps=WARPS,
        maxnreg=REGISTERS,
        launch_pdl=pdl > 0,
        num_stages=1,
    )
    columns = min(COMBINE_COLUMNS, d)
    combine_kernel[(r, nh, d // columns)](
        y,
        pos,
        part,
        stat,
        x,
        width,
        M=rows.m,
        NH=nh,
        D=d,
        BD=columns,
        SP=triton.next_power_of_2(max_splits),
        AT_ONCE=COMBINE_SPLITS,
        SPLIT=split,
        MAX_SPLITS=max_splits,
        PDL=hand_over_mode(x.device, early=True),
        num_warps=4,
        launch_pdl=pdl > 0,
    )
    if into is None:
        gemv(w.w_o, x, None, stream=stream, gain=gain)
    else:
        gemv(w.w_o, x, None, stream=into, row=row, source=stream.h, gain=gain)


def attention(
    h: Tensor, w: AttentionWeights, state: AttentionState, rows: Rows, ws: Workspace
) -> None:
    """Add the layer's output to ``h [R, H]``; see reference.py."""
    dtype = w.w_qkv.dtype
    run(stream_of(h, w.norm, dtype, ws), w, state, rows, ws, centred(ws, w.norm, dtype))
