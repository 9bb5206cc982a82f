"""Gated full attention between its two projections, one launch.

Works on ``y [R, (2*NH + 2*NKV) * D]`` (per head query | gate, then keys, then values; fp32). One
program per (walker, row, key head) reads fixed splits of ``SPLIT`` tokens at absolute boundaries:
query norm and rotation, the round's own keys (normalised, rotated) and values put into the cache,
then softmax over the split. The last program of a (row, key head) combines the splits in ascending
order and applies the sigmoid gate. What a row computes depends on its position alone: never on M,
on its neighbours, or on how many walkers run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vkengine.models.layout import AttentionWeights
from vkengine.ops import triton_config
from vkengine.ops.triton_common import sigmoid
from vkengine.ops.triton_launch import Stream, centred, counter, gemv, stream_of
from vkengine.rows import Rows, Workspace
from vkengine.state import PAD, AttentionState

#: Tokens per chunk of a split, and programs that share the splits of one (row, key head).
CHUNK = 64
WALKERS = 64
WARPS = 8


def split_tokens(max_len: int) -> int:
    """Tokens per split: fixed by the longest sequence the state can hold."""
    return 64 if max_len <= 8192 else 256


@triton.jit
def partner_of(d, ROT: tl.constexpr):
    """The dimension that rotates with d (d itself beyond the rotated ones)."""
    half: tl.constexpr = ROT // 2
    return tl.where(d < half, d + half, tl.where(d < ROT, d - half, d))


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
def attention_kernel(
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
    counter_ptr,
    x_ptr,
    y_stride,
    slot_tokens,
    eps,
    R,
    M: tl.constexpr,
    NH: tl.constexpr,
    NKV: tl.constexpr,
    D: tl.constexpr,
    ROT: tl.constexpr,
    GP: tl.constexpr,
    GC: tl.constexpr,
    SP: tl.constexpr,
    UNROLL: tl.constexpr,
    BT: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WALKERS: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    kvh = tl.program_id(1)
    walker = pid // R
    r = pid % R
    b = r // M
    pos0 = tl.load(pos_ptr + b)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    pos = pos0 + r % M
    n_splits = pos // SPLIT + 1
    group: tl.constexpr = NH // NKV
    half: tl.constexpr = ROT // 2
    scale: tl.constexpr = D**-0.5
    g = tl.arange(0, GP)
    d = tl.arange(0, D)
    heads = kvh * group + g
    mask = g < group
    partner = partner_of(d, ROT)
    # Cursors, gains and angles are more than one launch old; y is not.
    q_gain = tl.load(q_norm_ptr + d).to(tl.float32) + 1.0
    q_other_gain = tl.load(q_norm_ptr + partner).to(tl.float32) + 1.0
    k_gain = tl.load(k_norm_ptr + d).to(tl.float32) + 1.0
    k_other_gain = tl.load(k_norm_ptr + partner).to(tl.float32) + 1.0
    angle = pos.to(tl.int64) * half + d % half
    q_cos = tl.load(cos_ptr + angle, mask=d < ROT, other=1.0)
    q_sin = tl.load(sin_ptr + angle, mask=d < ROT, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if walker < n_splits:
        y = y_ptr + r.to(tl.int64) * y_stride
        q_at = y + heads[:, None] * (2 * D)
        q_raw = tl.load(q_at + d[None, :], mask=mask[:, None], other=0.0)
        q_other = tl.load(q_at + partner[None, :], mask=mask[:, None], other=0.0)
        cache = (slot * slot_tokens * NKV + kvh) * D
        # The round's own keys and values that this row may see: every program that reads one writes
        # it first (all of them the same bits), so no program depends on another.
        for j in tl.static_range(M):
            p_j = pos0 + j
            if (p_j <= pos) & ((p_j // SPLIT) % WALKERS == walker):
                y_j = y_ptr + (b * M + j).to(tl.int64) * y_stride + NH * 2 * D + kvh * D
                k_raw = tl.load(y_j + d)
                k_other = tl.load(y_j + partner)
                v_j = tl.load(y_j + NKV * D + d)
                at_j = p_j.to(tl.int64) * half + d % half
                k_cos = tl.load(cos_ptr + at_j, mask=d < ROT, other=1.0)
                k_sin = tl.load(sin_ptr + at_j, mask=d < ROT, other=0.0)
                k_j = rotated(k_raw, k_other, k_gain, k_other_gain, k_cos, k_sin, d, eps, D, ROT)
                own = cache + p_j.to(tl.int64) * (NKV * D) + d
                tl.store(k_ptr + own, k_j.to(k_ptr.dtype.element_ty))
                tl.store(v_ptr + own, v_j.to(v_ptr.dtype.element_ty))
        q = rotated(
            q_raw,
            q_other,
            q_gain[None, :],
            q_other_gain[None, :],
            q_cos[None, :],
            q_sin[None, :],
            d[None, :],
            eps,
            D,
            ROT,
        ).to(k_ptr.dtype.element_ty)
        tl.debug_barrier()
        split = walker
        while split < n_splits:
            top = tl.full([GP], float("-inf"), tl.float32)
            total = tl.zeros([GP], tl.float32)
            acc = tl.zeros([GP, D], tl.float32)
            for c in tl.static_range(SPLIT // BT):
                t0 = split * SPLIT + c * BT
                t = t0 + tl.arange(0, BT)
                at = cache + t[:, None].to(tl.int64) * (NKV * D) + d[None, :]
                inside = (t < slot_tokens)[:, None]
                k = tl.load(k_ptr + at, mask=inside, other=0.0)
                v = tl.load(v_ptr + at, mask=inside, other=0.0)
                s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
                s = tl.where((t <= pos)[None, :], s, float("-inf"))
                new_top = tl.maximum(top, tl.max(s, axis=1))
                # A chunk wholly beyond the row keeps the old maximum: no NaN from inf - inf.
                safe = tl.where(new_top == float("-inf"), 0.0, new_top)
                p = tl.exp(s - safe[:, None])
                fade = tl.exp(top - safe)
                total = total * fade + tl.sum(p, axis=1)
                acc = acc * fade[:, None] + tl.dot(
                    p.to(v_ptr.dtype.element_ty), v, input_precision="ieee"
                )
                top = new_top
            slot_of = (r * NH + heads) * MAX_SPLITS + split
            tl.store(
                part_ptr + slot_of[:, None].to(tl.int64) * D + d[None, :],
                acc,
                mask=(g < group)[:, None],
            )
            tl.store(stat_ptr + slot_of * 2, top, mask=g < group)
            tl.store(stat_ptr + slot_of * 2 + 1, total, mask=g < group)
            split += WALKERS
        tl.debug_barrier()
        counter = counter_ptr + r * NKV + kvh
        done = tl.atomic_add(counter, 1, sem="acq_rel")
        if done == tl.minimum(n_splits, WALKERS) - 1:
            tl.store(counter, 0)
            # Heads without the padding that the matrix units need.
            gc = tl.arange(0, GC)
            rows_of = (r * NH + kvh * group + gc) * MAX_SPLITS
            valid = gc < group
            gate_at = y + (kvh * group + gc)[:, None] * (2 * D) + D + d[None, :]
            gate = tl.load(gate_at, mask=valid[:, None], other=0.0)
            ns = tl.arange(0, SP)
            tops = tl.load(
                stat_ptr + (rows_of[:, None] + ns[None, :]) * 2,
                mask=valid[:, None] & (ns < n_splits)[None, :],
                other=float("-inf"),
                cache_modifier=".cg",
            )
            best = tl.where(valid, tl.max(tops, axis=1), 0.0)
            total = tl.zeros([GC], tl.float32)
            acc = tl.zeros([GC, D], tl.float32)
            s0 = walker * 0
            while s0 < n_splits:
                ms = ()
                ls = ()
                os = ()
                for i in tl.static_range(UNROLL):
                    live = valid & (s0 + i < n_splits)
                    at = rows_of + s0 + i
                    ms = ms + (
                        tl.load(
                            stat_ptr + at * 2, mask=live, other=float("-inf"), cache_modifier=".cg"
                        ),
                    )
                    ls = ls + (
                        tl.load(stat_ptr + at * 2 + 1, mask=live, other=0.0, cache_modifier=".cg"),
                    )
                    os = os + (
                        tl.load(
                            part_ptr + at[:, None].to(tl.int64) * D + d[None, :],
                            mask=live[:, None],
                            other=0.0,
                            cache_modifier=".cg",
                        ),
                    )
                for i in tl.static_range(UNROLL):
                    w = tl.exp(ms[i] - best)
                    total = tl.fma(w, ls[i], total)
                    acc = tl.fma(w[:, None] + tl.zeros_like(acc), os[i], acc)
                s0 += UNROLL
            out = acc / tl.where(valid, total, 1.0)[:, None] * sigmoid(gate)
            tl.store(
                x_ptr + r * (NH * D) + (kvh * group + gc)[:, None] * D + d[None, :],
                out.to(x_ptr.dtype.element_ty),
                mask=valid[:, None],
            )


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
    x = ws.get("attention.x", (r, nh * d), dtype)
    pdl = triton_config.PDL and x.device.type != "cpu"
    attention_kernel[(walkers * r, nkv)](
        y,
        centred(ws, w.q_norm, dtype),
        centred(ws, w.k_norm, dtype),
        w.cos,
        w.sin,
        rows.slot.contiguous(),
        rows.pos0.contiguous(),
        state.k,
        state.v,
        ws.get("attention.part", (r, nh, max_splits, d)),
        ws.get("attention.stat", (r, nh, max_splits, 2)),
        counter(ws, "attention", r * nkv),
        x,
        width,
        length,
        c.rms_eps,
        r,
        M=rows.m,
        NH=nh,
        NKV=nkv,
        D=d,
        ROT=c.rotary_dim,
        GP=max(16, triton.next_power_of_2(nh // nkv)),
        GC=triton.next_power_of_2(nh // nkv),
        SP=triton.next_power_of_2(max_splits),
        UNROLL=16,
        BT=CHUNK,
        SPLIT=split,
        MAX_SPLITS=max_splits,
        WALKERS=walkers,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
        num_stages=1,
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
