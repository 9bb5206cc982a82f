"""One gated delta layer over the rows of a round, token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vkengine.models.layout import GdnWeights
from vkengine.ops.linear import linear
from vkengine.ops.norm import l2_normalise, rms_norm
from vkengine.rows import Rows, Workspace
from vkengine.state import RING_MASK, GdnState


def project(h: Tensor, w: GdnWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm and in-projection. Returns qkv [R, C], z [R, Hv, dv], beta [R, Hv], decay [R, Hv].

    ``beta = sigmoid(b)``; ``decay = exp(-exp(A_log) * softplus(a + dt_bias))``.
    """
    c = w.config
    hv = c.gdn_value_heads
    x = linear(rms_norm(h, w.norm, c.rms_eps), w.w_in)
    qkv, z, b, a = x.split([c.conv_dim, c.value_size, hv, hv], dim=-1)
    decay = torch.exp(-torch.exp(w.a_log) * F.softplus(a + w.dt_bias))
    return qkv, z.reshape(-1, hv, c.gdn_value_dim), torch.sigmoid(b), decay


def convolve(window: Tensor, weight: Tensor) -> Tensor:
    """Causal convolution and SiLU. ``window [M+3, C]``: three rows before the first, then M."""
    m = window.shape[0] - 3
    y = window[0:m] * weight[:, 0]
    for tap in range(1, 4):
        y = y + window[tap : tap + m] * weight[:, tap]
    return F.silu(y)


def split_heads(y: Tensor, w: GdnWeights) -> tuple[Tensor, Tensor, Tensor]:
    """``y [M, C] -> q [M, Hv, dk] (normalised, scaled), k [M, Hk, dk] (normalised), v``."""
    c = w.config
    rep = c.gdn_value_heads // c.gdn_key_heads
    q, k, v = y.split([c.key_size, c.key_size, c.value_size], dim=-1)
    q = l2_normalise(q.reshape(-1, c.gdn_key_heads, c.gdn_key_dim)) * c.gdn_key_dim**-0.5
    k = l2_normalise(k.reshape(-1, c.gdn_key_heads, c.gdn_key_dim))
    return q.repeat_interleave(rep, dim=1), k, v.reshape(-1, c.gdn_value_heads, c.gdn_value_dim)


def finish(o: Tensor, z: Tensor, h: Tensor, w: GdnWeights) -> None:
    """Gated norm over each head, out-projection, residual. ``o, z [R, Hv, dv]``."""
    y = rms_norm(o, w.gate_norm, w.config.rms_eps) * F.silu(z)
    h += linear(y.flatten(1), w.w_out)


def advance(s: Tensor, key: Tensor, update: Tensor, decay: Tensor) -> Tensor:
    """``S * decay + k u^T``: key [Hv, dk], update [Hv, dv], decay [Hv], S [Hv, dk, dv]."""
    return s * decay[:, None, None] + key[:, :, None] * update[:, None, :]


def gdn(h: Tensor, w: GdnWeights, state: GdnState, rows: Rows, ws: Workspace) -> None:
    """Add the layer's output to ``h [R, H]``; fold accepted rows, leave live rows in the rings.

    The caller sets ``folded[slot] = pos0`` after the last layer of the round.
    """
    qkv, z, beta, decay = project(h, w)
    c = w.config
    rep = c.gdn_value_heads // c.gdn_key_heads
    out = torch.empty_like(z)
    for b, (slot, pos0) in enumerate(rows.pairs):
        s = state.S[slot]
        for p in range(int(state.folded[slot]), pos0):
            i = p & RING_MASK
            key = state.ring_k[slot, i].repeat_interleave(rep, dim=0)
            s = advance(s, key, state.ring_u[slot, i], state.ring_g[slot, i])
        state.S[slot] = s
        live = slice(b * rows.m, (b + 1) * rows.m)
        for j in range(rows.m):
            state.conv[slot, (pos0 + j) & RING_MASK] = qkv[b * rows.m + j]
        index = torch.arange(pos0 - 3, pos0 + rows.m, device=h.device) & RING_MASK
        q, k, v = split_heads(convolve(state.conv[slot, index], w.conv), w)
        for j in range(rows.m):
            i, r = (pos0 + j) & RING_MASK, live.start + j
            key = k[j].repeat_interleave(rep, dim=0)  # [Hv, dk]
            s = s * decay[r][:, None, None]
            memory = (s * key[:, :, None]).sum(1)  # S^T k, [Hv, dv]
            update = beta[r][:, None] * (v[j] - memory)
            s = s + key[:, :, None] * update[:, None, :]
            out[r] = (s * q[j][:, :, None]).sum(1)
            state.ring_k[slot, i] = k[j]
            state.ring_u[slot, i] = update
            state.ring_g[slot, i] = decay[r]
    finish(out, z, h, w)
