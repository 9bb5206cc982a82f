"""Prompts, in units of 64 tokens at absolute boundaries.

A unit is always computed as 64 rows (the last one padded), so its numbers depend on the tokens
before it and in it alone, however the caller splits a prompt into steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .models.layout import AttentionWeights, GdnWeights, LayerWeights, ModelWeights, MoeWeights
from .ops.attention import cpu as attention_cpu
from .ops.attention import reference as attention_reference
from .ops.embed import embed
from .ops.gdn import cpu as gdn_cpu
from .ops.gdn import reference as gdn_reference
from .ops.mlp import mlp
from .ops.mlp.reference import mlp as mlp_reference
from .ops.moe import moe
from .ops.moe.reference import moe_unit
from .rows import Workspace
from .state import RING, RING_MASK, AttentionState, GdnState, State

UNIT = 64
#: The recurrent state is left at a multiple of this below the last token; the rest is pending.
FOLD = 8


@dataclass(slots=True)
class Span:
    """Tokens ``start .. start + count - 1`` of one slot, as rows of one padded unit."""

    slot: int
    start: int  # a multiple of UNIT
    count: int  # 1..UNIT

    @property
    def end(self) -> int:
        return self.start + self.count


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    """Chunked gated delta rule over T tokens from state s.

    q, k [Hv, T, dk] (k normalised, q normalised and scaled), v [Hv, T, dv], log_decay and beta
    [Hv, T], s [Hv, dk, dv]. Returns outputs and update vectors, both [Hv, T, dv]. Decays enter
    only as exp of differences of cumulative logs that are never positive, so nothing overflows
    however small a decay is; log_decay may be 0.
    """
    t = q.shape[1]
    total = log_decay.cumsum(-1)  # [Hv, T]
    later = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()
    gap = (total[:, :, None] - total[:, None, :]).masked_fill(~later, float("-inf"))
    between = gap.exp()  # [Hv, T, T], decay from j to t for j <= t
    start = total.exp()[..., None]  # [Hv, T, 1]
    mix = torch.bmm(k, k.transpose(1, 2)) * between * beta[..., None]
    rest = (v - start * torch.bmm(k, s)) * beta[..., None]
    unit = mix.tril(-1) + torch.eye(t, device=q.device)
    u = torch.linalg.solve_triangular(unit, rest, upper=False, unitriangular=True)
    out = start * torch.bmm(q, s) + torch.bmm(torch.bmm(q, k.transpose(1, 2)) * between, u)
    return out, u


def state_after(s: Tensor, k: Tensor, u: Tensor, log_decay: Tensor, count: int) -> Tensor:
    """State after the first ``count`` tokens of a chunk (shapes as in delta_rule)."""
    if count == 0:
        return s
    total = log_decay[:, :count].cumsum(-1)
    weight = (total[:, -1:] - total).exp()[..., None]  # [Hv, count, 1]
    carried = s * total[:, -1, None, None].exp()
    return carried + torch.bmm((k[:, :count] * weight).transpose(1, 2), u[:, :count])


def _gdn(h: Tensor, w: GdnWeights, state: GdnState, span: Span) -> None:
    c = w.config
    hv, rep = c.gdn_value_heads, c.gdn_value_heads // c.gdn_key_heads
    slot, n = span.slot, span.count
    p: gdn_cpu.PackedGdn | None = w.packed
    before = torch.arange(span.start - 3, span.start, device=h.device) & RING_MASK
    if p is not None:
        qkv, z, beta, log_decay = gdn_cpu.project(h, p)
        beta, log_decay = beta[:, :hv], log_decay[:, :hv]
        window = torch.cat((state.conv[slot, before], qkv))
        q, k, v = gdn_cpu.split_heads(gdn_cpu.convolve(window, p), p)
        q = q.repeat_interleave(rep, dim=1)
    else:
        qkv, z, beta, decay = gdn_reference.project(h, w)
        log_decay = torch.log(decay.clamp_min(torch.finfo(torch.float32).tiny))
        window = torch.cat((state.conv[slot, before], qkv))
        q, k, v = gdn_reference.split_heads(gdn_reference.convolve(window, w.conv), w)
    key = k.repeat_interleave(rep, dim=1).transpose(0, 1)
    gates = log_decay.t().contiguous(), beta.t().contiguous()
    s = state.S[slot]
    out, u = delta_rule(q.transpose(0, 1), key, v.transpose(0, 1), *gates, s)
    folded = (span.end // FOLD * FOLD) - span.start
    state.S[slot] = state_after(s, key, u, gates[0], folded)
    recent = torch.arange(max(0, n - RING), n, device=h.device)
    ring = (recent + span.start) & RING_MASK
    state.conv[slot, ring] = qkv[recent]
    state.ring_k[slot, ring] = k[recent]
    state.ring_u[slot, ring] = u.transpose(0, 1)[recent]
    state.ring_g[slot, ring] = log_decay[recent].exp()
    out = out.transpose(0, 1).contiguous()
    if p is not None:
        gdn_cpu.finish(out, z, h, p)
    else:
        gdn_reference.finish(out, z, h, w)


def _attention(
    h: Tensor, w: AttentionWeights, state: AttentionState, span: Span, ws: Workspace
) -> None:
    slot, start = span.slot, span.start
    cache = state.k[slot], state.v[slot]
    live = slice(start, start + UNIT)
    p: attention_cpu.PackedAttention | None = w.packed
    if p is not None:
        qk, gate, v = attention_cpu.project(h, p, p.turns[live])
        q, k = qk[:, : p.heads], qk[:, p.heads :]
        v = v.view(UNIT, p.kv_heads, p.dim)
    else:
        positions = torch.arange(start, start + UNIT, device=h.device)
        q, gate, k, v = attention_reference.project(h, w, positions)
    cache[0][live] = k.to(cache[0].dtype)
    cache[1][live] = v.to(cache[1].dtype)
    scale = 1.0 if p is not None else w.config.head_dim**-0.5
    out = _unit_attention(q, *cache, start, scale)
    if p is not None:
        h += p.w_o.apply(out.reshape(UNIT, -1).mul_(torch.sigmoid(gate)))
    else:
        attention_reference.finish(out, gate, h, w)


def _unit_attention(q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """Causal attention of one unit: q [UNIT, nh, D] over a slot's cache -> [UNIT, nh, D]."""
    nh, d = q.shape[1:]
    nkv = keys.shape[1]
    groups = nh // nkv
    length = start + UNIT
    rows = q.view(UNIT, nkv, groups, d).permute(1, 2, 0, 3).reshape(nkv, groups * UNIT, d)
    scores = torch.bmm(rows, keys[:length].float().permute(1, 2, 0)).mul_(scale)
    scores = scores.view(nkv, groups, UNIT, length)
    later = torch.ones(UNIT, UNIT, dtype=torch.bool, device=q.device).triu(1)
    scores[..., start:].masked_fill_(later, float("-inf"))
    probs = torch.softmax(scores, dim=-1).view(nkv, groups * UNIT, length)
    out = torch.bmm(probs, values[:length].float().transpose(0, 1))
    return out.view(nkv, groups, UNIT, d).permute(2, 0, 1, 3).reshape(UNIT, nh, d)


def _feed_forward(h: Tensor, layer: LayerWeights, ws: Workspace) -> None:
    ffn = layer.ffn
    if isinstance(ffn, MoeWeights):
        if ffn.packed is not None:
            moe(h, ffn, None, None, ws)
        else:
            moe_unit(h, ffn)
    elif ffn.packed is not None:
        mlp(h, ffn, None, None, ws)
    else:
        mlp_reference(h, ffn, None, None, ws)


def layer_unit(
    h: Tensor, layer: LayerWeights, state: GdnState | AttentionState, span: Span, ws: Workspace
) -> None:
    """One layer over one unit, in place on ``h [UNIT, H]``."""
    if isinstance(layer.mixer, GdnWeights):
        assert isinstance(state, GdnState)
        _gdn(h, layer.mixer, state, span)
    else:
        assert isinstance(state, AttentionState)
        _attention(h, layer.mixer, state, span, ws)
    _feed_forward(h, layer, ws)


def prefill_unit(
    weights: ModelWeights, state: State, tokens: Tensor, span: Span, ws: Workspace
) -> Tensor:
    """Run one unit: ``tokens [count] i64``. Returns the residual stream [count, H] f32.

    The slot must hold exactly the tokens before ``span.start``.
    """
    assert span.start % UNIT == 0 and 1 <= span.count <= UNIT, span
    assert tokens.shape == (span.count,), tokens.shape
    h = embed(F.pad(tokens, (0, UNIT - span.count)), weights.embed)
    for layer, layer_state in zip(weights.layers, state.layers, strict=True):
        layer_unit(h, layer, layer_state, span, ws)
    state.folded[span.slot] = span.end // FOLD * FOLD
    return h[: span.count]
