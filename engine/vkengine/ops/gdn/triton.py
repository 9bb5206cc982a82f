"""Gated DeltaNet between its two projections, one program per tile of a value head and sequence.

Works on ``y [R, conv_dim + Hv*dv + 2*Hv]`` (qkv | z | b | a, fp32): causal convolution over the
ring of earlier rows, SiLU, gates, l2 norm, the delta rule token by token, and ``x = o * gain *
silu(z) [R, Hv*dv]`` in the weight's type. The gated norm's root mean square spans a head, a
program only ``BV`` of its columns, so each program leaves a partial sum of squares ``[R, Hv,
dv/BV]`` and the output projection applies the factor per head.

State is keyed by absolute position (index ``p & (RING - 1)``): the stored matrix holds the tokens
before ``folded``; entries ``folded .. pos0 - 1`` of the rings are replayed into it first with the
instruction a live step uses (``S = fma(k, u, S * g)``), so that a drafted and rolled-back history
leaves the same bits as one that never drafted. Live rows write ring entries and leave the stored
matrix alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vkengine.models.layout import GdnWeights
from vkengine.ops.triton_common import hand_over, sigmoid, silu, softplus
from vkengine.ops.triton_config import hand_over_mode
from vkengine.ops.triton_launch import Stream, centred, gemv, stream_of
from vkengine.rows import Rows, Workspace
from vkengine.state import RING, GdnState

#: Columns of a value head per program, and its warps: one warp needs no barrier in its sums.
BV = 16
WARPS = 2
#: Rows that one round may leave pending: the most rows a round may carry.
PENDING = 8


@triton.jit
def history(ring_ptr, weight_ptr, channels, pos0, conv_dim, RING: tl.constexpr, TAPS: tl.constexpr):
    """The rows before the round that its convolutions reach back to, and the taps' weights."""
    past = ()
    taps = ()
    for t in tl.static_range(TAPS - 1):
        p = pos0 - (TAPS - 1) + t
        at = ring_ptr + (p & (RING - 1)) * conv_dim + channels
        past = past + (tl.load(at, mask=channels * 0 + p >= 0, other=0.0).to(tl.float32),)
    for t in tl.static_range(TAPS):
        taps = taps + (tl.load(weight_ptr + channels * TAPS + t).to(tl.float32),)
    return past, taps


@triton.jit
def convolve(rows, taps, J: tl.constexpr, TAPS: tl.constexpr):
    """SiLU of the causal convolution at live row J; ``rows``: TAPS - 1 past rows, then the live."""
    acc = rows[J] * taps[0]
    for t in tl.static_range(1, TAPS):
        acc = tl.fma(taps[t], rows[J + t], acc)
    return silu(acc)


@triton.jit
def advance(like, k, u, decayed):
    """``decayed + k u^T``, one fused multiply-add each: replay and live steps share these bits."""
    return tl.fma(k[:, None] + tl.zeros_like(like), u[None, :] + tl.zeros_like(like), decayed)


@triton.jit
def gdn_kernel(
    y_ptr,
    conv_w_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    x_ptr,
    squares_ptr,
    slot_ptr,
    pos_ptr,
    folded_ptr,
    conv_ptr,
    s_ptr,
    ring_k_ptr,
    ring_u_ptr,
    ring_g_ptr,
    y_stride,
    M: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles: tl.constexpr = DV // BV
    pid = tl.program_id(0)
    b = tl.program_id(1)
    hv = pid // tiles
    tile = pid % tiles
    group: tl.constexpr = HV // HK
    hk = hv // group
    conv_dim: tl.constexpr = 2 * HK * DK + HV * DV
    slot = tl.load(slot_ptr + b).to(tl.int64)
    pos0 = tl.load(pos_ptr + b)
    folded = tl.load(folded_ptr + slot)
    dk = tl.arange(0, DK)
    dv = tile * BV + tl.arange(0, BV)
    s_tile = s_ptr + (slot * HV + hv) * (DK * DV) + dk[:, None] * DV + dv[None, :]
    rk = ring_k_ptr + slot * (RING * HK * DK) + hk * DK + dk
    ru = ring_u_ptr + slot * (RING * HV * DV) + hv * DV + dv
    rg = ring_g_ptr + slot * (RING * HV) + hv
    conv = conv_ptr + slot * (RING * conv_dim)
    s = tl.load(s_tile)
    # All loads are issued before the first use: the chain below is short of latency, not bytes.
    ring_k = ()
    ring_u = ()
    ring_g = ()
    for i in tl.static_range(PENDING):
        at = (folded + i) & (RING - 1)
        live = folded + i < pos0
        old_k = tl.load(rk + at * (HK * DK), mask=dk * 0 + live > 0, other=0.0)
        old_u = tl.load(ru + at * (HV * DV), mask=dv * 0 + live > 0, other=0.0)
        ring_k = ring_k + (old_k,)
        ring_u = ring_u + (old_u,)
        ring_g = ring_g + (tl.load(rg + at * HV, mask=live, other=1.0),)
    a_rate = tl.exp(tl.load(a_log_ptr + hv).to(tl.float32))
    bias = tl.load(dt_bias_ptr + hv).to(tl.float32)
    gain = tl.load(norm_ptr + dv).to(tl.float32)
    q_ch = hk * DK + dk
    k_ch = HK * DK + q_ch
    v_ch = 2 * HK * DK + hv * DV + dv
    q_rows, q_taps = history(conv, conv_w_ptr, q_ch, pos0, conv_dim, RING, TAPS)
    k_rows, k_taps = history(conv, conv_w_ptr, k_ch, pos0, conv_dim, RING, TAPS)
    v_rows, v_taps = history(conv, conv_w_ptr, v_ch, pos0, conv_dim, RING, TAPS)
    for i in tl.static_range(PENDING):
        if folded + i < pos0:
            s = advance(s, ring_k[i], ring_u[i], s * ring_g[i])
    if folded < pos0:
        tl.store(s_tile, s)
    # Everything so far is more than one launch old: state, cursors, rings. Only y is not.
    hand_over(PDL)
    rows = y_ptr + (b * M).to(tl.int64) * y_stride
    z_in = ()
    b_in = ()
    a_in = ()
    for j in tl.static_range(M):
        yj = rows + j * y_stride
        q_rows = q_rows + (tl.load(yj + q_ch),)
        k_rows = k_rows + (tl.load(yj + k_ch),)
        v_rows = v_rows + (tl.load(yj + v_ch),)
        z_in = z_in + (tl.load(yj + conv_dim + hv * DV + dv),)
        b_in = b_in + (tl.load(yj + conv_dim + HV * DV + hv),)
        a_in = a_in + (tl.load(yj + conv_dim + HV * DV + HV + hv),)
    qs = ()
    ks = ()
    vs = ()
    zs = ()
    betas = ()
    decays = ()
    for j in tl.static_range(M):
        q = convolve(q_rows, q_taps, j, TAPS)
        k = convolve(k_rows, k_taps, j, TAPS)
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        g = tl.exp(-a_rate * softplus(a_in[j] + bias))
        qs = qs + (q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (DK**-0.5)),)
        ks = ks + (k,)
        vs = vs + (convolve(v_rows, v_taps, j, TAPS),)
        zs = zs + (gain * silu(z_in[j]),)
        betas = betas + (sigmoid(b_in[j]),)
        decays = decays + (g,)
        i = (pos0 + j) & (RING - 1)
        raw_v = v_rows[TAPS - 1 + j]
        tl.store(conv + i * conv_dim + v_ch, raw_v.to(conv_ptr.dtype.element_ty))
        if tile == 0:
            tl.store(rg + i * HV, g)
        if pid % (group * tiles) == 0:
            raw_q = q_rows[TAPS - 1 + j]
            raw_k = k_rows[TAPS - 1 + j]
            tl.store(rk + i * (HK * DK), k)
            tl.store(conv + i * conv_dim + q_ch, raw_q.to(conv_ptr.dtype.element_ty))
            tl.store(conv + i * conv_dim + k_ch, raw_k.to(conv_ptr.dtype.element_ty))
    for j in tl.static_range(M):
        q = qs[j]
        k = ks[j]
        s = s * decays[j]
        seen = tl.sum(s * k[:, None], axis=0)
        read = tl.sum(s * q[:, None], axis=0)
        u = betas[j] * (vs[j] - seen)
        # S_new^T q = (g S)^T q + (k . q) u: one exchange between warps less on the chain.
        o = tl.fma(tl.sum(k * q, axis=0) + tl.zeros_like(u), u, read)
        if j < M - 1:
            s = advance(s, k, u, s)
        r = b * M + j
        tl.store(squares_ptr + (r * HV + hv) * tiles + tile, tl.sum(o * o, axis=0))
        tl.store(x_ptr + r * (HV * DV) + hv * DV + dv, (o * zs[j]).to(x_ptr.dtype.element_ty))
        tl.store(ru + ((pos0 + j) & (RING - 1)) * (HV * DV), u)


def run(
    stream: Stream, w: GdnWeights, state: GdnState, rows: Rows, ws: Workspace, gain: Tensor
) -> None:
    """``stream += gdn(norm(stream))``; ``gain`` is that of the norm which reads the stream next."""
    c = w.config
    r = stream.h.shape[0]
    batch, m = r // rows.m, rows.m
    hk, hv, dk, dv = c.gdn_key_heads, c.gdn_value_heads, c.gdn_key_dim, c.gdn_value_dim
    dtype = w.w_in.dtype
    width = w.w_in.shape[0]
    y = ws.get("gdn.y", (r, width))
    gemv(w.w_in, stream.hx, y, eps=c.rms_eps, norm=stream.squares)
    bv = min(BV, dv)
    x = ws.get("gdn.x", (r, hv * dv), dtype)
    squares = ws.get("gdn.squares", (r, hv, dv // bv))
    pdl = hand_over_mode(stream.h.device, early=True)
    assert m + PENDING <= RING, "ring too short for the rows of two rounds"
    gdn_kernel[(hv * (dv // bv), batch)](
        y,
        w.conv,
        w.a_log,
        w.dt_bias,
        w.gate_norm,
        x,
        squares,
        rows.slot.contiguous(),
        rows.pos0.contiguous(),
        state.folded,
        state.conv,
        state.S,
        state.ring_k,
        state.ring_u,
        state.ring_g,
        width,
        M=m,
        HK=hk,
        HV=hv,
        DK=dk,
        DV=dv,
        BV=bv,
        TAPS=c.conv_width,
        RING=RING,
        PENDING=PENDING,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl > 0,
    )
    gemv(w.w_out, x, None, eps=c.rms_eps, squares=squares, head=dv, stream=stream, gain=gain)


def gdn(h: Tensor, w: GdnWeights, state: GdnState, rows: Rows, ws: Workspace) -> None:
    """Add the layer's output to ``h [R, H]``; see reference.py."""
    dtype = w.w_in.dtype
    run(stream_of(h, w.norm, dtype, ws), w, state, rows, ws, centred(ws, w.norm, dtype))
