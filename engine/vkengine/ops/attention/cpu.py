"""Gated attention on packed matrices.

Inside a head the dimensions are re-ordered when packing so that each rotated pair is adjacent:
RoPE is then one complex product. Queries, keys and the cache share that order, and no product
depends on it. The cached keys are therefore private to this path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vkengine.models.layout import AttentionWeights
from vkengine.ops.linear import PackedMatrix, pack
from vkengine.ops.norm.cpu import inverse_norm
from vkengine.rows import Rows, Workspace
from vkengine.state import AttentionState

#: Tokens per split (as in reference.py).
SPLIT = 256
#: Query rows per product: one constant shape, so that a row's bits do not depend on the round.
GROUP = 4


@dataclass(slots=True)
class PackedAttention:
    heads: int
    kv_heads: int
    dim: int
    eps_in: float
    gain_in: Tensor  # [H] f32, norm * sqrt(H)
    eps_head: float
    w_in: PackedMatrix  # rows q | k (re-ordered) | gate | v
    gains: Tensor  # [nh + nkv, D] f32, softmax scale folded into the queries'
    w_o: PackedMatrix
    turns: Tensor  # [positions, 1, D/2] complex64
    band: Tensor  # [1, GROUP * groups, 2 * SPLIT] f32: see _mask
    sizes: list[int]


def pair_order(dim: int, rotary: int) -> Tensor:
    """Head dimensions with the pair (i, i + rotary/2) adjacent, the rest unchanged."""
    half = rotary // 2
    pairs = torch.stack((torch.arange(half), torch.arange(half, rotary)), dim=1).flatten()
    return torch.cat((pairs, torch.arange(rotary, dim)))


def prepare(w: AttentionWeights, turns: Tensor | None = None) -> None:
    """Re-order and pack. ``turns`` shares one rotation table among layers."""
    c = w.config
    nh, nkv, d, hidden = c.num_heads, c.num_kv_heads, c.head_dim, c.hidden_size
    assert isinstance(w.w_qkv, Tensor) and isinstance(w.w_o, Tensor)
    order = pair_order(d, c.rotary_dim)
    q_gate, k, v = w.w_qkv.float().split([2 * nh * d, nkv * d, nkv * d])
    q_gate = q_gate.view(nh, 2, d, hidden)
    q = q_gate[:, 0][:, order].reshape(nh * d, hidden)
    gate = q_gate[:, 1].reshape(nh * d, hidden)
    k = k.view(nkv, d, hidden)[:, order].reshape(nkv * d, hidden)
    # rms gain sqrt(D); the query also carries the softmax scale D^-0.5.
    gains = torch.cat(
        (w.q_norm[order].expand(nh, d), (w.k_norm[order] * d**0.5).expand(nkv, d))
    ).contiguous()
    groups = nh // nkv
    column = torch.arange(2 * SPLIT)
    row = torch.arange(GROUP).repeat_interleave(groups)
    band = torch.zeros(1, GROUP * groups, 2 * SPLIT)
    band.masked_fill_(column[None, None] > (row[None, :, None] + SPLIT - 1), float("-inf"))
    w.packed = PackedAttention(
        heads=nh,
        kv_heads=nkv,
        dim=d,
        eps_in=hidden * c.rms_eps,
        gain_in=w.norm * hidden**0.5,
        eps_head=d * c.rms_eps,
        w_in=pack(torch.cat((q, k, gate, v))),
        gains=gains,
        w_o=pack(w.w_o),
        turns=rotation_table(w) if turns is None else turns,
        band=band,
        sizes=[(nh + nkv) * d, nh * d, nkv * d],
    )


def rotation_table(w: AttentionWeights) -> Tensor:
    """``[positions, 1, D/2]`` complex64: e^(i angle) for rotated pairs, 1 for the rest."""
    positions, half = w.cos.shape
    table = torch.ones(positions, 1, w.config.head_dim // 2, dtype=torch.complex64)
    table[:, 0, :half] = torch.complex(w.cos, w.sin)
    return table


def project(h: Tensor, p: PackedAttention, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``h [R, H]``, turns ``[R, 1, D/2]`` -> (q|k [R, nh+nkv, D] rotated, gate, v [R, nkv*D])."""
    y = p.w_in.apply((h * inverse_norm(h, p.eps_in)).mul_(p.gain_in))
    qk, gate, v = y.split_with_sizes(p.sizes, 1)
    qk = qk.view(-1, p.heads + p.kv_heads, p.dim)
    qk = (qk * inverse_norm(qk, p.eps_head)).mul_(p.gains)
    torch.view_as_complex(qk.view(-1, p.heads + p.kv_heads, p.dim // 2, 2)).mul_(turns)
    return qk, gate, v


def _mask(scores: Tensor, band: Tensor, pos0: int, length: int) -> None:
    """Set scores of cache entries after a row's own position to -inf.

    Only columns from the split that holds ``pos0`` on can be later than a row. Row j of the band
    is -inf after column ``j + SPLIT - 1``, which is aligned with column ``pos0 + j``.
    """
    first = pos0 // SPLIT * SPLIT
    shift = SPLIT - 1 - (pos0 - first)
    if length - first <= SPLIT:
        scores[:, :, first:].add_(band[:, :, shift : shift + SPLIT])
        return
    edge = first + 2 * SPLIT - shift  # the band ends here; what lies beyond is later than any row
    scores[:, :, first:edge].add_(band[:, :, shift:])
    scores[:, :, edge:].fill_(float("-inf"))


def attend(
    q: Tensor, keys: Tensor, values: Tensor, p: PackedAttention, pos0: int, ws: Workspace
) -> Tensor:
    """Rows pos0..pos0+m-1 (m <= GROUP) over one slot's cache: q [m, nh, D] -> [m, nh, D]."""
    m = q.shape[0]
    nkv, d = p.kv_heads, p.dim
    groups = p.heads // nkv
    splits = (pos0 + m - 1) // SPLIT + 1
    length = splits * SPLIT
    block = ws.get("attention.q", (nkv, GROUP, groups, d))
    block[:, :m].copy_(q.view(m, nkv, groups, d).transpose(0, 1))
    scores = torch.bmm(block.view(nkv, GROUP * groups, d), keys[:length].permute(1, 2, 0))
    _mask(scores, p.band, pos0, length)
    scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    cells = values[:length].transpose(0, 1)
    if splits == 1:
        acc = torch.bmm(scores, cells)
        acc.div_(scores.sum(-1, keepdim=True))
    else:
        acc = torch.bmm(scores[:, :, :SPLIT], cells[:, :SPLIT])
        for start in range(SPLIT, length, SPLIT):
            end = start + SPLIT
            acc.add_(torch.bmm(scores[:, :, start:end], cells[:, start:end]))
        sums = scores.view(nkv, GROUP * groups, splits, SPLIT).sum(-1)
        acc.div_(sums.cumsum(-1)[:, :, -1:])
    return acc.view(nkv, GROUP, groups, d)[:, :m].transpose(0, 1).reshape(m, p.heads, d)


def attention(
    h: Tensor, w: AttentionWeights, state: AttentionState, rows: Rows, ws: Workspace
) -> None:
    """See reference.attention."""
    p: PackedAttention = w.packed
    m, pairs = rows.m, rows.pairs
    if len(pairs) == 1:
        pos = pairs[0][1]
        turns = p.turns[pos : pos + m]
    else:
        turns = torch.cat([p.turns[pos : pos + m] for _, pos in pairs])
    qk, gate, v = project(h, p, turns)
    v = v.view(-1, p.kv_heads, p.dim)
    parts = []
    for b, (slot, pos) in enumerate(pairs):
        keys, values = state.k[slot], state.v[slot]
        start, end = b * m, b * m + m
        keys[pos : pos + m].copy_(qk[start:end, p.heads :])
        values[pos : pos + m].copy_(v[start:end])
        for first in range(0, m, GROUP):
            last = min(first + GROUP, m)
            q = qk[start + first : start + last, : p.heads]
            parts.append(attend(q, keys, values, p, pos + first, ws))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    h += p.w_o.apply(out.reshape(h.shape[0], -1) * torch.sigmoid(gate))
