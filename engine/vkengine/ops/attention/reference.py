"""One gated attention layer over the rows of a round."""

from __future__ import annotations

import torch
from torch import Tensor

from vkengine.models.layout import AttentionWeights
from vkengine.ops.linear import linear
from vkengine.ops.norm import rms_norm
from vkengine.rows import Rows, Workspace
from vkengine.state import AttentionState

#: Tokens per split. A row's sums are formed per split and added in ascending order.
SPLIT = 256
#: Query rows are padded to a multiple of this, so that products have one shape.
GROUP = 8


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split RoPE on the first ``2 * cos.shape[-1]`` dims. x [R, heads, D], cos [R, half]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def project(
    h: Tensor, w: AttentionWeights, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm, projections, q/k norms, RoPE. Returns q, gate [R, nh, D] and k, v [R, nkv, D]."""
    c = w.config
    nh, nkv, d = c.num_heads, c.num_kv_heads, c.head_dim
    x = linear(rms_norm(h, w.norm, c.rms_eps), w.w_qkv)
    q_gate, k, v = x.split([2 * nh * d, nkv * d, nkv * d], dim=-1)
    q, gate = q_gate.reshape(-1, nh, 2, d).unbind(2)
    cos, sin = w.cos[positions], w.sin[positions]
    q = rotate(rms_norm(q, w.q_norm, c.rms_eps), cos, sin)
    k = rotate(rms_norm(k.reshape(-1, nkv, d), w.k_norm, c.rms_eps), cos, sin)
    return q, gate, k, v.reshape(-1, nkv, d)


def attend(q: Tensor, k: Tensor, v: Tensor, pos0: int) -> Tensor:
    """Causal attention of rows pos0.. over a cache. q [M, nh, D]; k, v [length, nkv, D].

    Row j sees cache entries 0..pos0+j. Splits of 256 tokens of constant shape; the maximum is
    taken over the whole row first, so each split's sums are independent of the others. ``k`` and
    ``v`` must extend to the end of the last split needed; entries past a row are masked, but must
    be finite.
    """
    m, nh, d = q.shape
    nkv = k.shape[1]
    groups = nh // nkv
    padded = -(-m // GROUP) * GROUP
    last = pos0 + m - 1
    splits = last // SPLIT + 1
    length = splits * SPLIT
    keys = k[:length].float().permute(1, 2, 0)  # [nkv, D, length]
    values = v[:length].float().transpose(0, 1)  # [nkv, length, D]
    full = torch.zeros(padded, nh, d, device=q.device)
    full[:m] = q
    out = torch.empty(padded, nh, d, device=q.device)
    steps = torch.arange(length, device=q.device)
    for start in range(0, padded, GROUP):
        # [nkv, GROUP * groups, D]: row-major over (row, query head of the group)
        part = full[start : start + GROUP].reshape(GROUP, nkv, groups, d)
        part = part.transpose(0, 1).reshape(nkv, GROUP * groups, d)
        scores = torch.bmm(part, keys) * d**-0.5
        limit = pos0 + start + torch.arange(GROUP, device=q.device).repeat_interleave(groups)
        scores.masked_fill_(steps[None, None] > limit[None, :, None], float("-inf"))
        p = torch.exp(scores - scores.amax(-1, keepdim=True))
        total = torch.zeros(nkv, GROUP * groups, 1, device=q.device)
        acc = torch.zeros(nkv, GROUP * groups, d, device=q.device)
        for i in range(splits):
            span = slice(i * SPLIT, (i + 1) * SPLIT)
            total += p[:, :, span].sum(-1, keepdim=True)
            acc += torch.bmm(p[:, :, span], values[:, span])
        block = (acc / total).reshape(nkv, GROUP, groups, d).transpose(0, 1)
        out[start : start + GROUP] = block.reshape(GROUP, nh, d)
    return out[:m]


def finish(o: Tensor, gate: Tensor, h: Tensor, w: AttentionWeights) -> None:
    """Sigmoid gate, out-projection, residual. ``o, gate [R, nh, D]``."""
    h += linear((o * torch.sigmoid(gate)).flatten(1), w.w_o)


def attention(
    h: Tensor, w: AttentionWeights, state: AttentionState, rows: Rows, ws: Workspace
) -> None:
    """Add the layer's output to ``h [R, H]``; row at position p writes cache index p."""
    m = rows.m
    span = torch.arange(m, device=h.device)
    positions = (rows.pos0.long()[:, None] + span).flatten()
    q, gate, k, v = project(h, w, positions)
    out = torch.empty_like(q)
    for b, (slot, pos0) in enumerate(rows.pairs):
        live = slice(b * m, (b + 1) * m)
        state.k[slot, pos0 : pos0 + m] = k[live].to(state.k.dtype)
        state.v[slot, pos0 : pos0 + m] = v[live].to(state.v.dtype)
        out[live] = attend(q[live], state.k[slot], state.v[slot], pos0)
    finish(out, gate, h, w)
