"""Gated DeltaNet over a long run of one sequence's tokens, in blocks of 64.

Three launches between the two projections. ``enter_kernel``: convolution, SiLU, unit keys and
queries, gates; rows past ``count`` become zeros with decay 1, so they change nothing.
``block_kernel``, one program per (block, value head), inverts the block's unit lower-triangular
system (I + A) u = rest as T, and leaves W = T (beta D k), U = T (beta v) and the causal products
P of queries with keys. ``scan_kernel``, one program per tile of a value head, walks the blocks in
order with the fp32 state: u = U - W S, o = D q S + P u, S = D_end S + (D_end / D) k^T u.

Decays enter as exp of differences of cumulative logs that are never positive.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkengine.models.layout import GdnWeights
from vkengine.ops.rowwise import precision_of
from vkengine.ops.triton_common import sigmoid, silu, softplus
from vkengine.rows import Workspace
from vkengine.state import RING, GdnState

#: Tokens per block, and of its diagonal sub-blocks.
BLOCK = 64
SUB = 16
#: Columns of a value head per program of the scan.
BV = 32
#: Rows per program where rows are independent.
BT = 16


@triton.jit(do_not_specialize=["slot", "start", "count"])
def enter_kernel(
    y_ptr, taps_ptr, a_log_ptr, bias_ptr, ring_ptr, out_ptr, beta_ptr, log_ptr,
    slot, start, count,
    HK: tl.constexpr, HV: tl.constexpr, HVP: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
    TAPS: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Grid (R / BT, 2 * HK + HV + 1): one head of q, k or v, or (the last) all gates."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    conv_dim: tl.constexpr = (2 * HK + HV) * D
    width: tl.constexpr = conv_dim + HV * D + 2 * HV
    live = t < count
    row = t.to(tl.int64)
    if head == 2 * HK + HV:
        hv = tl.arange(0, HVP)
        real = (hv < HV)[None, :] & live[:, None]
        at = y_ptr + row[:, None] * width + conv_dim + HV * D + hv[None, :]
        b = tl.load(at, mask=real, other=0.0)
        a = tl.load(at + HV, mask=real, other=0.0)
        rate = tl.exp(tl.load(a_log_ptr + hv, mask=hv < HV, other=0.0).to(tl.float32))
        bias = tl.load(bias_ptr + hv, mask=hv < HV, other=0.0).to(tl.float32)
        to = row[:, None] * HV + hv[None, :]
        wanted = (hv < HV)[None, :] & (t >= 0)[:, None]
        tl.store(beta_ptr + to, tl.where(real, sigmoid(b), 0.0), mask=wanted)
        log = -rate[None, :] * softplus(a + bias[None, :])
        tl.store(log_ptr + to, tl.where(real, log, 0.0), mask=wanted)
    else:
        c = head * D + tl.arange(0, D)
        ring = ring_ptr + slot.to(tl.int64) * (RING * conv_dim)
        acc = tl.zeros([BT, D], tl.float32)
        for tap in tl.static_range(TAPS):
            p = t - (TAPS - 1) + tap
            new = tl.load(
                y_ptr + p.to(tl.int64)[:, None] * width + c[None, :],
                mask=((p >= 0) & live)[:, None], other=0.0,
            )  # fmt: skip
            old = tl.load(
                ring + ((start + p) & (RING - 1))[:, None] * conv_dim + c[None, :],
                mask=((p < 0) & (start + p >= 0) & live)[:, None], other=0.0,
            )  # fmt: skip
            weight = tl.load(taps_ptr + c * TAPS + tap).to(tl.float32)
            acc += (new + old.to(tl.float32)) * weight[None, :]
        x = silu(acc)
        if head < 2 * HK:
            x = x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]
            if head < HK:
                x = x * (D**-0.5)
        x = tl.where(live[:, None], x, 0.0)
        tl.store(out_ptr + row[:, None] * conv_dim + c[None, :], x)


@triton.jit
def block_kernel(
    x_ptr, beta_ptr, log_ptr, total_ptr, w_ptr, u_ptr, p_ptr,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, HV)."""
    n = tl.program_id(0)
    hv = tl.program_id(1)
    group: tl.constexpr = HV // HK
    conv_dim: tl.constexpr = (2 * HK + HV) * D
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    row = (n * BLOCK + i).to(tl.int64)
    rows = x_ptr + row[:, None] * conv_dim + d[None, :]
    k = tl.load(rows + (HK + hv // group) * D)
    total = tl.cumsum(tl.load(log_ptr + row * HV + hv), axis=0)
    beta = tl.load(beta_ptr + row * HV + hv)
    tl.store(total_ptr + row * HV + hv, total)
    below = i[:, None] > i[None, :]
    gap = total[:, None] - total[None, :]
    between = tl.exp(tl.where(i[:, None] >= i[None, :], gap, float("-inf")))
    kt = tl.trans(k)
    a = tl.dot(k, kt, input_precision=PRECISION) * between * beta[:, None]
    a = tl.where(below, a, 0.0)
    same = (i[:, None] // SUB) == (i[None, :] // SUB)
    # Inverse of the diagonal sub-blocks by forward substitution, all sub-blocks at once: a
    # column belongs to one sub-block, so one vector holds the same local row of each.
    inverse = tl.where(same, -a, 0.0)
    for r in range(1, SUB):
        chosen = (i[:, None] % SUB) == r
        line = tl.sum(tl.where(chosen & same, inverse, 0.0), axis=0)
        line = line + tl.sum(line[:, None] * tl.where(chosen, 0.0, inverse), axis=0)
        inverse = tl.where(chosen & same, line[None, :], inverse)
    inverse = inverse + tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    # (I + A) = D^-1 + L, so (I + A)^-1 = (I + N)^-1 D with N = D L, and N^4 = 0.
    far = tl.where(same, 0.0, a)
    step = tl.dot(inverse, far, input_precision=PRECISION)
    twice = tl.dot(step, step, input_precision=PRECISION)
    x = inverse + tl.dot(twice, inverse, input_precision=PRECISION)
    x = x - tl.dot(step, x, input_precision=PRECISION)
    at = (row[:, None] * HV + hv) * D + d[None, :]
    w = tl.dot(x, k * (beta * tl.exp(total))[:, None], input_precision=PRECISION)
    tl.store(w_ptr + at, w)
    v = tl.load(rows + (2 * HK + hv) * D)
    tl.store(u_ptr + at, tl.dot(x, v * beta[:, None], input_precision=PRECISION))
    q = tl.load(rows + (hv // group) * D)
    p = tl.dot(q, kt, input_precision=PRECISION) * between
    tl.store(p_ptr + (row[:, None] * HV + hv) * BLOCK + i[None, :], p)


@triton.jit(do_not_specialize=["slot", "blocks"])
def scan_kernel(
    x_ptr, total_ptr, w_ptr, u_ptr, p_ptr, s_ptr, out_ptr, slot, blocks,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (D / BV, HV). Leaves the state after the last block and outputs ``[R, HV, D]``."""
    tile = tl.program_id(0)
    hv = tl.program_id(1)
    group: tl.constexpr = HV // HK
    conv_dim: tl.constexpr = (2 * HK + HV) * D
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    v = tile * BV + tl.arange(0, BV)
    state = s_ptr + (slot.to(tl.int64) * HV + hv) * (D * D) + d[:, None] * D + v[None, :]
    s = tl.load(state)
    for n in range(blocks):
        row = (n * BLOCK + i).to(tl.int64)
        rows = x_ptr + row[:, None] * conv_dim + d[None, :]
        total = tl.load(total_ptr + row * HV + hv)
        end = tl.load(total_ptr + (n * BLOCK + BLOCK - 1) * HV + hv)
        w = tl.load(w_ptr + (row[:, None] * HV + hv) * D + d[None, :])
        u = tl.load(u_ptr + (row[:, None] * HV + hv) * D + v[None, :])
        u = u - tl.dot(w, s, input_precision=PRECISION)
        q = tl.load(rows + (hv // group) * D) * tl.exp(total)[:, None]
        o = tl.dot(q, s, input_precision=PRECISION)
        p = tl.load(p_ptr + (row[:, None] * HV + hv) * BLOCK + i[None, :])
        o += tl.dot(p, u, input_precision=PRECISION)
        tl.store(out_ptr + (row[:, None] * HV + hv) * D + v[None, :], o)
        k = tl.load(rows + (HK + hv // group) * D) * tl.exp(end - total)[:, None]
        s = s * tl.exp(end) + tl.dot(tl.trans(k), u, input_precision=PRECISION)
    tl.store(state, s)


@triton.jit
def leave_kernel(
    o_ptr, y_ptr, norm_ptr, x_ptr, eps,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Grid (R / BT, HV): the gated norm, in the weights' type."""
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    hv = tl.program_id(1)
    d = tl.arange(0, D)
    conv_dim: tl.constexpr = (2 * HK + HV) * D
    width: tl.constexpr = conv_dim + HV * D + 2 * HV
    at = (t[:, None] * HV + hv) * D + d[None, :]
    o = tl.load(o_ptr + at)
    z = tl.load(y_ptr + t[:, None] * width + conv_dim + hv * D + d[None, :])
    gain = tl.load(norm_ptr + d).to(tl.float32)
    o = o * tl.rsqrt(tl.sum(o * o, axis=1) / D + eps)[:, None] * gain[None, :] * silu(z)
    tl.store(x_ptr + at, o.to(x_ptr.dtype.element_ty))


def mix(
    y: Tensor, w: GdnWeights, state: GdnState, slot: int, start: int, count: int, ws: Workspace
) -> Tensor:
    """From the in-projection's ``y [R, width]`` f32 (R a multiple of 64, ``count`` rows real) to
    the out-projection's input ``[R, Hv * dv]``. ``S`` must hold exactly the tokens below
    ``start`` and then holds those below ``start + count``; the convolution's ring follows, the
    caller moves ``folded``."""
    c = w.config
    hk, hv, d = c.gdn_key_heads, c.gdn_value_heads, c.gdn_key_dim
    if c.gdn_value_dim != d or y.shape[0] % BLOCK:
        raise ValueError("key and value heads must be of one size, rows a multiple of 64")
    r = y.shape[0]
    device, dtype = y.device, w.w_in.dtype
    precision = precision_of(dtype)

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, device=device)

    x, beta, log, total = scratch(r, c.conv_dim), scratch(r, hv), scratch(r, hv), scratch(r, hv)
    enter_kernel[(r // BT, 2 * hk + hv + 1)](
        y, w.conv, w.a_log, w.dt_bias, state.conv, x, beta, log, slot, start, count,
        HK=hk, HV=hv, HVP=triton.next_power_of_2(hv), D=d, BT=BT, TAPS=c.conv_width, RING=RING,
        num_warps=4,
    )  # fmt: skip
    recent = torch.arange(max(0, count - RING), count, device=device)
    state.conv[slot].index_copy_(0, (recent + start) % RING, y[recent, : c.conv_dim])
    ww, u, p, o = scratch(r, hv, d), scratch(r, hv, d), scratch(r, hv, BLOCK), scratch(r, hv, d)
    block_kernel[(r // BLOCK, hv)](
        x, beta, log, total, ww, u, p,
        HK=hk, HV=hv, D=d, BLOCK=BLOCK, SUB=SUB, PRECISION=precision, num_warps=8,
    )  # fmt: skip
    bv = min(BV, d)
    scan_kernel[(d // bv, hv)](
        x, total, ww, u, p, state.S, o, slot, r // BLOCK,
        HK=hk, HV=hv, D=d, BLOCK=BLOCK, BV=bv, PRECISION=precision, num_warps=4, num_stages=1,
    )  # fmt: skip
    out = torch.empty(r, hv * d, device=device, dtype=dtype)
    leave_kernel[(r // BT, hv)](
        o, y, w.gate_norm, out, c.rms_eps, HK=hk, HV=hv, D=d, BT=BT, num_warps=4
    )
    return out
