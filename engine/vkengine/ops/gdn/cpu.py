"""Gated delta layer on packed matrices, in blocks of eight absolute positions.

Positions fall into blocks of eight. ``S`` always stands at a block's start (``folded`` is a
multiple of eight); a row's output is formed from that S and from the keys and update vectors of
its own block, which sit in the rings whether they were written this round or earlier::

    u_t = beta_t * (v_t - D_t * S^T k_t - sum_{j<t} D_tj (k_t . k_j) u_j)
    o_t = D_t * S^T q_t + sum_{j<=t} D_tj (q_t . k_j) u_j

with D_t the decay from the block's start to t and D_tj that from j to t. Every product has one
constant shape in which row t has a constant place, so its bits depend on neither the round it
was computed in nor on rejected rows. Rows past a block's end in the same round start from a
temporary S; the stored S only ever takes in tokens below the position a round starts at.

Queries are not scaled by dk^-0.5 here: the gated norm that follows is scale-free but for its
epsilon, which is multiplied by dk instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vkengine.models.layout import GdnWeights
from vkengine.ops.linear import PackedMatrix, pack
from vkengine.ops.norm.cpu import inverse_norm, padded
from vkengine.rows import Rows, Workspace
from vkengine.state import RING_MASK, GdnState

from .views import BLOCK, Entry, Half, Scratch, Slot, entry_views, scratch_views, slot_views

BLOCK_MASK = BLOCK - 1
_L2_EPS = 1e-6


@dataclass(slots=True)
class Tables:
    """Constants of a head layout, shared by layers."""

    later: Tensor  # [9, 8] bool: column i is after entry j - 1
    ones: Tensor  # [] f32
    causal: Tensor  # [2, 8, 8] f32: strict for keys, inclusive for queries
    windows: list[Tensor]  # per p & 15, ring indices of p-3, p-2, p-1
    spans: list[list[Tensor]]  # per p & 15 and row count, ring indices p, p+1, ...


@dataclass(slots=True)
class PackedGdn:
    key_heads: int
    heads: int
    dk: int
    dv: int
    eps_in: float
    eps_out: float
    gain_in: Tensor  # [H] f32, norm * sqrt(H)
    gain_out: Tensor  # [Hv*dv] f32, gate_norm * sqrt(dv) for every head
    w_in: PackedMatrix  # rows qkv | z | b padded to 32 | a padded to 32
    taps: tuple[Tensor, ...]  # four of [C]
    tap_rows: Tensor  # [4, 1, C]: the same
    rate: Tensor  # [pad] f32, -exp(A_log)
    dt_bias: Tensor  # [pad] f32
    w_out: PackedMatrix
    sizes: list[int]
    tables: Tables

    @property
    def dims(self) -> tuple[int, int, int, int]:
        return self.key_heads, self.heads, self.dk, self.dv


def make_tables() -> Tables:
    index = torch.arange(BLOCK)
    entry = torch.arange(BLOCK + 1) - 1
    strict = (index[None] < index[:, None]).float()
    inclusive = (index[None] <= index[:, None]).float()
    return Tables(
        later=index[None] > entry[:, None],
        ones=torch.ones(()),
        causal=torch.stack((strict, inclusive)),
        windows=[(torch.arange(p - 3, p) & RING_MASK) for p in range(RING_MASK + 1)],
        spans=[
            [(torch.arange(p, p + m) & RING_MASK) for m in range(RING_MASK + 1)]
            for p in range(RING_MASK + 1)
        ],
    )


_TABLES: list[Tables] = []


def prepare(w: GdnWeights) -> None:
    """Pad the gates and pack."""
    c = w.config
    hv, dk, dv = c.gdn_value_heads, c.gdn_key_dim, c.gdn_value_dim
    assert isinstance(w.w_in, Tensor) and isinstance(w.w_out, Tensor)
    if not _TABLES:
        _TABLES.append(make_tables())
    pad = padded(hv)
    qkv_z, b, a = w.w_in.float().split([c.conv_dim + c.value_size, hv, hv])
    gates = torch.zeros(2 * pad, c.hidden_size)
    gates[:hv], gates[pad : pad + hv] = b, a
    rate, dt_bias = torch.zeros(pad), torch.zeros(pad)
    rate[:hv], dt_bias[:hv] = -torch.exp(w.a_log), w.dt_bias
    w.packed = PackedGdn(
        key_heads=c.gdn_key_heads,
        heads=hv,
        dk=dk,
        dv=dv,
        eps_in=c.hidden_size * c.rms_eps,
        eps_out=dv * c.rms_eps * dk,
        gain_in=w.norm * c.hidden_size**0.5,
        gain_out=(w.gate_norm * dv**0.5).repeat(hv),
        w_in=pack(torch.cat((qkv_z, gates))),
        taps=tuple(w.conv[:, i].contiguous() for i in range(4)),
        tap_rows=w.conv.t().unsqueeze(1).contiguous(),
        rate=rate,
        dt_bias=dt_bias,
        w_out=pack(w.w_out),
        sizes=[c.conv_dim, c.value_size, pad, pad],
        tables=_TABLES[0],
    )


def project(h: Tensor, p: PackedGdn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv [R, C], z [R, Hv*dv], beta [R, pad], log decay [R, pad]."""
    y = p.w_in.apply((h * inverse_norm(h, p.eps_in)).mul_(p.gain_in))
    qkv, z, b, a = y.split_with_sizes(p.sizes, 1)
    return qkv, z, torch.sigmoid(b), F.softplus(a.add_(p.dt_bias)).mul_(p.rate)


def convolve(window: Tensor, p: PackedGdn) -> Tensor:
    """``window [M+3, C]`` -> SiLU of the causal convolution [M, C]."""
    m = window.shape[0] - 3
    w0, w1, w2, w3 = p.taps
    y = window[:m] * w0
    y.addcmul_(window[1 : m + 1], w1).addcmul_(window[2 : m + 2], w2).addcmul_(window[3:], w3)
    return F.silu(y, inplace=True)


def split_heads(y: Tensor, p: PackedGdn) -> tuple[Tensor, Tensor, Tensor]:
    """``y [M, C]`` -> q, k [M, Hk, dk] of unit length and v [M, Hv, dv]."""
    m = y.shape[0]
    keys = 2 * p.key_heads
    qk, v = y.split_with_sizes((keys * p.dk, p.heads * p.dv), 1)
    qk = qk.view(m, keys, p.dk)
    qk = qk * inverse_norm(qk, _L2_EPS)
    q, k = qk.chunk(2, 1)
    return q, k, v.view(m, p.heads, p.dv)


def finish(o: Tensor, z: Tensor, h: Tensor, p: PackedGdn) -> None:
    """Gated norm, out-projection, residual: o [R, Hv, dv], z [R, Hv*dv]."""
    count = h.shape[0]
    y = (o * inverse_norm(o, p.eps_out)).view(count, -1)
    h += p.w_out.apply(y.mul_(F.silu(z)).mul_(p.gain_out))


def fold(s: Tensor, keys: Tensor, updates: Tensor, decay: Tensor, heads: int) -> Tensor:
    """S after a whole block: s [Hv, dk, dv]; keys [8, Hk, dk], updates [8, Hv, dv], decay [8, Hv].

    Returns a new tensor.
    """
    rep = heads // keys.shape[1]
    # after[i]: decay from entry i to the block's end, both exclusive of i.
    after = torch.ones(BLOCK, heads)
    torch.cumprod(decay.flip(0)[:-1], 0, out=after[1:])
    after = after.flip(0)
    k = keys.repeat_interleave(rep, dim=1) if rep > 1 else keys
    k = k * after[:, :, None]  # [8, Hv, dk]
    whole = (after[0] * decay[0])[:, None, None]
    return torch.baddbmm(s * whole, k.permute(1, 2, 0), updates.transpose(0, 1))


def _block(
    q: Tensor, v: Tensor, gain: Tensor, s: Tensor, half: Half, first: int, t: Tables, b: Scratch
) -> Tensor:
    """Rows ``first..first+m-1`` of one block, whose keys and decays are already in the ring.

    q [Hk, 1, m, dk], v [Hv, m, dv], gain (beta) [Hv, m, 1], s [Hv, dk, dv] at the block's start.
    Writes the new update vectors into the ring; returns the outputs [m, Hv, dv] (in scratch).
    """
    b.x_keys.copy_(half.keys)
    b.x_queries.copy_(q)
    torch.bmm(b.x, s, out=b.read)
    torch.bmm(b.x, b.keys_t, out=b.dots)
    # decay[h, j, i] = product of g over (j-1, i]; entry 0 is the block's start
    torch.where(t.later, half.decay, t.ones, out=b.gates)
    torch.cumprod(b.gates, -1, out=b.decay)
    b.dots_halves.mul_(b.between).mul_(t.causal)
    b.read_halves.mul_(b.start)
    torch.sub(v, b.read_keys, out=b.rest).mul_(gain)
    torch.mul(b.dots_keys, gain, out=b.mix)
    for j, row in enumerate(b.mix_rows):
        torch.bmm(row, half.past, out=b.done)
        torch.sub(b.rest_rows[j], b.done_row, out=half.updates[first + j])
    torch.baddbmm(b.read_queries, b.dots_queries, half.past, out=b.out)
    return b.out_rows


def _enter(qkv: Tensor, slot: Slot, pos0: int, p: PackedGdn, e: Entry) -> None:
    """Convolve m new rows ``qkv [m, C]`` into ``e`` and remember them and their keys."""
    span = p.tables.spans[pos0 & RING_MASK][qkv.shape[0]]
    torch.index_select(slot.conv, 0, p.tables.windows[pos0 & RING_MASK], out=e.recent)
    e.new.copy_(qkv)
    slot.conv.index_copy_(0, span, e.new)
    torch.mul(e.taps, p.tap_rows, out=e.products)
    torch.sum(e.products, 0, out=e.y)
    F.silu(e.y, inplace=True)
    torch.mul(e.qk, inverse_norm(e.qk, _L2_EPS), out=e.unit)
    slot.ring_k.index_copy_(0, span, e.k)


def gdn(h: Tensor, w: GdnWeights, state: GdnState, rows: Rows, ws: Workspace) -> None:
    """See reference.gdn; ``folded`` must be a multiple of eight, at most 15 below ``pos0``.

    The caller sets ``folded[slot]`` to ``pos0`` rounded down to eight after the last layer.
    """
    p: PackedGdn = w.packed
    m = rows.m
    qkv, z, beta, rate = project(h, p)
    decay = rate.exp_()
    if p.heads != decay.shape[1]:
        beta, decay = beta[:, : p.heads], decay[:, : p.heads]
    t = p.tables
    folded = state.folded.tolist()
    out = ws.get("gdn.o", (h.shape[0], p.heads, p.dv))
    entry = entry_views(p.dims, m, ws)
    pairs = rows.pairs
    own_qkv, own_beta, own_decay, own_out = qkv, beta, decay, out
    for b, (slot, pos0) in enumerate(pairs):
        views = slot_views(state, slot)
        # First of all: the new rows may overwrite ring entries that are yet to be folded.
        s = views.s
        for start in range(folded[slot], pos0 & ~BLOCK_MASK, BLOCK):
            s.copy_(fold(s, *views.halves[start >> 3 & 1].ring, p.heads))
        if len(pairs) > 1:
            own = slice(b * m, b * m + m)
            own_qkv, own_beta, own_decay, own_out = qkv[own], beta[own], decay[own], out[own]
        _enter(own_qkv, views, pos0, p, entry)
        views.ring_g.index_copy_(0, t.spans[pos0 & RING_MASK][m], own_decay)
        gain = own_beta.t().unsqueeze(-1)  # [Hv, m, 1]
        first = pos0 & BLOCK_MASK
        live = views.halves[pos0 >> 3 & 1]
        if first + m <= BLOCK:
            scratch = scratch_views(p.dims, first, m, ws)
            own_out.copy_(_block(entry.q_t, entry.v_t, gain, s, live, first, t, scratch))
            continue
        half, done, count = pos0 >> 3 & 1, 0, BLOCK - first
        while True:
            rest = slice(done, done + count)
            scratch = scratch_views(p.dims, first, count, ws)
            q, v = entry.q_t[:, :, rest], entry.v_t[:, rest]
            own_out[rest].copy_(_block(q, v, gain[:, rest], s, live, first, t, scratch))
            done += count
            if done == m:
                break
            s = fold(s, *live.ring, p.heads)
            first, half, count = 0, half ^ 1, min(m - done, BLOCK)
            live = views.halves[half]
    finish(out, z, h, p)
