"""Gated full attention between its two projections, one launch.

Works on ``y [R, (2*NH + 2*NKV) * D]`` (per head query | gate, then keys, then values; fp32). One
program per (walker, row, key head) reads fixed splits of ``SPLIT`` tokens at absolute boundaries:
query norm and rotation, the round's own keys (normalised, rotated) and values put into the cache,
then softmax over the split. The last program of a (row, key head) combines the splits in ascending order and applies the sigmoid gate. What a row
computes depends on its position alone: never on M, on its neighbours, or on how many walkers run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vkengine.models.layout import AttentionWeights
from vkengine.ops import triton_config
from vkengine.ops.triton_common import prefetch_l2, sigmoid
from vkengine.ops.triton_launch import Prefetch, Stream, centred, counter, gemv, stream_of
from vkengine.rows import Rows, Workspace
from vkengine.state import PAD, AttentionState

#: Tokens per chunk of a split, and programs that share the splits of one (row, key head).
CHUNK = 64
WALKERS = 64


def split_tokens(max_len: int) -> int:
    """Tokens per split: fixed by the longest sequence the state can hold."""
    return 64 if max_len <= 8192 else 256


@triton.jit
def rotated(
    base_ptr, norm_ptr, cos_ptr, sin_ptr, d, pos, eps, mask, D: tl.constexpr, ROT: tl.constexpr
):
    """RMS norm over the last axis and rotation of its first ROT values; ``base_ptr [.., D]``."""
    half: tl.constexpr = ROT // 2
    partner = tl.where(d < half, d + half, tl.where(d < ROT, d - half, d))
    x = tl.load(base_ptr + d, mask=mask, other=0.0)
    other = tl.load(base_ptr + partner, mask=mask, other=0.0)
    axis: tl.constexpr = len(x.shape) - 1
    inverse = tl.rsqrt(tl.sum(x * x, axis=axis) / D + eps)
    if axis == 1:
        inverse = inverse[:, None]
    x = x * inverse * (tl.load(norm_ptr + d).to(tl.float32) + 1.0)
    other = other * inverse * (tl.load(norm_ptr + partner).to(tl.float32) + 1.0)
    angle = pos.to(tl.int64) * half + d % half
    c = tl.load(cos_ptr + angle, mask=d < ROT, other=1.0)
    s = tl.load(sin_ptr + angle, mask=d < ROT, other=0.0)
    return x * c + tl.where(d < half, -other, other) * s


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
    pf_ptr,
    pf_bytes,
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
    BT: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WALKERS: tl.constexpr,
    PF: tl.constexpr,
    PDL: tl.constexpr,
    THREADS: tl.constexpr,
):
    pid = tl.program_id(0)
    kvh = tl.program_id(1)
    if PF > 0:
        first = (pid * NKV + kvh).to(tl.int64) * (THREADS * PF * 128)
        prefetch_l2(pf_ptr, first, pf_bytes, THREADS, PF)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    walker = pid // R
    r = pid % R
    b = r // M
    pos0 = tl.load(pos_ptr + b)
    pos = pos0 + r % M
    n_splits = pos // SPLIT + 1
    group: tl.constexpr = NH // NKV
    scale: tl.constexpr = D**-0.5
    if walker < n_splits:
        slot = tl.load(slot_ptr + b).to(tl.int64)
        g = tl.arange(0, GP)
        d = tl.arange(0, D)
        heads = kvh * group + g
        y = y_ptr + r.to(tl.int64) * y_stride
        q = rotated(
            y + heads[:, None] * (2 * D) + tl.zeros([1, D], tl.int32),
            q_norm_ptr,
            cos_ptr,
            sin_ptr,
            d[None, :],
            pos,
            eps,
            (g < group)[:, None],
            D,
            ROT,
        ).to(k_ptr.dtype.element_ty)
        cache = (slot * slot_tokens * NKV + kvh) * D
        # The round's own keys and values that this row may see: every program that reads one writes
        # it first (all of them the same bits), so no program depends on another.
        for j in tl.static_range(M):
            p_j = pos0 + j
            if (p_j <= pos) & ((p_j // SPLIT) % WALKERS == walker):
                y_j = y_ptr + (b * M + j).to(tl.int64) * y_stride + NH * 2 * D + kvh * D
                k_j = rotated(y_j, k_norm_ptr, cos_ptr, sin_ptr, d, p_j, eps, d < D, D, ROT)
                v_j = tl.load(y_j + NKV * D + d)
                own = cache + p_j.to(tl.int64) * (NKV * D) + d
                tl.store(k_ptr + own, k_j.to(k_ptr.dtype.element_ty))
                tl.store(v_ptr + own, v_j.to(v_ptr.dtype.element_ty))
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
            row_of = (r * NH + heads) * MAX_SPLITS
            mask = g < group
            best = tl.full([GP], float("-inf"), tl.float32)
            s0 = walker * 0
            while s0 < n_splits:
                for i in tl.static_range(8):
                    m = tl.load(
                        stat_ptr + (row_of + s0 + i) * 2,
                        mask=mask & (s0 + i < n_splits),
                        other=float("-inf"),
                        cache_modifier=".cg",
                    )
                    best = tl.maximum(best, m)
                s0 += 8
            best = tl.where(mask, best, 0.0)
            total = tl.zeros([GP], tl.float32)
            acc = tl.zeros([GP, D], tl.float32)
            s0 = walker * 0
            while s0 < n_splits:
                for i in tl.static_range(8):
                    live = mask & (s0 + i < n_splits)
                    at = row_of + s0 + i
                    m = tl.load(
                        stat_ptr + at * 2, mask=live, other=float("-inf"), cache_modifier=".cg"
                    )
                    n = tl.load(stat_ptr + at * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
                    o = tl.load(
                        part_ptr + at[:, None].to(tl.int64) * D + d[None, :],
                        mask=live[:, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    w = tl.exp(m - best)
                    total = tl.fma(w, n, total)
                    acc = tl.fma(w[:, None] + tl.zeros_like(o), o, acc)
                s0 += 8
            gate = tl.load(
                y + heads[:, None] * (2 * D) + D + d[None, :], mask=mask[:, None], other=0.0
            )
            out = acc / tl.where(mask, total, 1.0)[:, None] * sigmoid(gate)
            tl.store(
                x_ptr + r * (NH * D) + heads[:, None] * D + d[None, :],
                out.to(x_ptr.dtype.element_ty),
                mask=mask[:, None],
            )


def run(
    stream: Stream,
    w: AttentionWeights,
    state: AttentionState,
    rows: Rows,
    ws: Workspace,
    *,
    pf_out: float,
    pf: Prefetch | None,
) -> None:
    """``stream += attention(norm(stream))``; prefetches as in the DeltaNet's ``run``."""
    c = w.config
    r = stream.h.shape[0]
    nh, nkv, d = c.num_heads, c.num_kv_heads, c.head_dim
    dtype = w.w_qkv.dtype
    width = w.w_qkv.shape[0]
    y = ws.get("attention.y", (r, width))
    gemv(w.w_qkv, stream.hx, y, eps=c.rms_eps, gain=centred(ws, w.norm, dtype))
    length = state.k.shape[1]
    split = split_tokens(length - PAD)
    max_splits = -(-length // split)
    walkers = min(WALKERS, max_splits)
    x = ws.get("attention.x", (r, nh * d), dtype)
    ahead = Prefetch.of(w.w_o, pf_out)
    pdl = triton_config.PDL and x.device.type != "cpu"
    units = 0
    if ahead is not None:
        units = -(-ahead.n_bytes // (walkers * r * nkv * 256 * 128))
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
        ahead.weight if ahead else y,
        ahead.n_bytes if ahead else 0,
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
        BT=CHUNK,
        SPLIT=split,
        MAX_SPLITS=max_splits,
        WALKERS=walkers,
        PF=units,
        PDL=pdl,
        THREADS=256,
        num_warps=8,
        launch_pdl=pdl,
        num_stages=1,
    )
    gemv(w.w_o, x, None, stream=stream, pf=pf)


def attention(
    h: Tensor, w: AttentionWeights, state: AttentionState, rows: Rows, ws: Workspace
) -> None:
    """Add the layer's output to ``h [R, H]``; see reference.py."""
    run(stream_of(h, w.w_qkv.dtype, ws), w, state, rows, ws, pf_out=0.0, pf=None)
