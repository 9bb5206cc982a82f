"""Gated attention of a long run of one sequence's tokens over its cache, two launches.

``cache_kernel``: query and key norms, rotation, keys and values into the cache (real rows only).
``attend_kernel``: causal attention in tiles at absolute positions with a running maximum, then the
sigmoid gate. Cache entries from ``end`` on are never read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkengine.models.layout import AttentionWeights
from vkengine.ops.rowwise import precision_of
from vkengine.ops.triton_common import sigmoid
from vkengine.state import AttentionState


@triton.jit(do_not_specialize=["slot", "start", "count", "slot_tokens"])
def cache_kernel(
    y_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
    slot, start, count, slot_tokens, eps,
    NH: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr, ROT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Grid (R / BT, NH + 2 * NKV): a query, key or value head."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    width: tl.constexpr = 2 * (NH + NKV) * D
    half: tl.constexpr = ROT // 2
    row = t.to(tl.int64)
    live = (t < count)[:, None] & (d >= 0)[None, :]
    base = y_ptr + row[:, None] * width
    into = (slot.to(tl.int64) * slot_tokens + start + row)[:, None] * (NKV * D) + d[None, :]
    if head >= NH + NKV:
        v = head - NH - NKV
        x = tl.load(base + (2 * NH + NKV + v) * D + d[None, :], mask=live, other=0.0)
        tl.store(v_ptr + into + v * D, x.to(v_ptr.dtype.element_ty), mask=live)
    else:
        is_q = head < NH
        at = tl.where(is_q, 2 * head * D, (2 * NH + head - NH) * D)
        partner = tl.where(d < half, d + half, tl.where(d < ROT, d - half, d))
        x = tl.load(base + at + d[None, :], mask=live, other=0.0)
        other = tl.load(base + at + partner[None, :], mask=live, other=0.0)
        gain = tl.where(is_q, tl.load(q_norm_ptr + d), tl.load(k_norm_ptr + d))
        other_gain = tl.where(is_q, tl.load(q_norm_ptr + partner), tl.load(k_norm_ptr + partner))
        inverse = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        turns = (d < ROT)[None, :] & live
        angle = (start + row)[:, None] * half + (d % half)[None, :]
        c = tl.load(cos_ptr + angle, mask=turns, other=1.0)
        s = tl.load(sin_ptr + angle, mask=turns, other=0.0)
        other = other * inverse * other_gain[None, :]
        x = x * inverse * gain[None, :] * c + tl.where((d < half)[None, :], -other, other) * s
        if is_q:
            to = q_ptr + (row[:, None] * NH + head) * D + d[None, :]
            tl.store(to, x.to(q_ptr.dtype.element_ty))
        else:
            to = k_ptr + into + (head - NH) * D
            tl.store(to, x.to(k_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["slot", "start", "count", "slot_tokens"])
def attend_kernel(
    q_ptr, y_ptr, k_ptr, v_ptr, x_ptr, slot, start, count, slot_tokens,
    NH: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (R / BM, NH), the longest rows first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    t = tile * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    row = t.to(tl.int64)
    width: tl.constexpr = 2 * (NH + NKV) * D
    q = tl.load(q_ptr + (row[:, None] * NH + head) * D + d[None, :])
    base = slot.to(tl.int64) * slot_tokens * (NKV * D) + (head // (NH // NKV)) * D
    keys = k_ptr + base
    values = v_ptr + base
    n = tl.arange(0, BN)
    end = start + count
    scale: tl.constexpr = D**-0.5 * 1.4426950408889634
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for first in range(0, tl.minimum(end, start + (tile + 1) * BM), BN):
        p = first + n
        at = p[:, None] * (NKV * D) + d[None, :]
        k = tl.load(keys + at, mask=(p < end)[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = (p[None, :] <= start + t[:, None]) & (p < end)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, axis=1))
        e = tl.exp2(scores - new[:, None])
        keep = tl.exp2(top - new)
        total = total * keep + tl.sum(e, axis=1)
        v = tl.load(values + at, mask=(p < end)[:, None], other=0.0)
        acc = acc * keep[:, None]
        acc = tl.dot(e.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new
    gate = tl.load(y_ptr + row[:, None] * width + (2 * head + 1) * D + d[None, :])
    out = acc / total[:, None] * sigmoid(gate)
    to = x_ptr + (row[:, None] * NH + head) * D + d[None, :]
    tl.store(to, out.to(x_ptr.dtype.element_ty))


def remember(
    y: Tensor, w: AttentionWeights, state: AttentionState, slot: int, start: int, count: int
) -> Tensor:
    """Keys and values of ``y [R, width]`` f32 into the cache; returns the queries."""
    c = w.config
    nh, nkv, d = c.num_heads, c.num_kv_heads, c.head_dim
    q = torch.empty(y.shape[0], nh, d, device=y.device, dtype=state.k.dtype)
    cache_kernel[(y.shape[0] // 16, nh + 2 * nkv)](
        y, w.q_norm, w.k_norm, w.cos, w.sin, q, state.k, state.v,
        slot, start, count, state.k.shape[1], c.rms_eps,
        NH=nh, NKV=nkv, D=d, ROT=c.rotary_dim, BT=16, num_warps=4,
    )  # fmt: skip
    return q


def mix(
    y: Tensor, w: AttentionWeights, state: AttentionState, slot: int, start: int, count: int
) -> Tensor:
    """From the projection's ``y`` to the out-projection's input ``[R, nh * D]``."""
    c = w.config
    nh, nkv, d = c.num_heads, c.num_kv_heads, c.head_dim
    q = remember(y, w, state, slot, start, count)
    dtype = state.k.dtype
    x = torch.empty(y.shape[0], nh * d, device=y.device, dtype=dtype)
    bm, bn, warps = (32, 16, 4) if dtype == torch.float32 else (128, 32, 8)
    attend_kernel[(y.shape[0] // bm, nh)](
        q, y, state.k, state.v, x, slot, start, count, state.k.shape[1],
        NH=nh, NKV=nkv, D=d, BM=bm, BN=bn, PRECISION=precision_of(dtype),
        num_warps=warps, num_stages=2,
    )  # fmt: skip
    return x
