"""Mixture of experts for small layers: all experts in two products, unchosen ones weighted zero.

A CPU spends more on a call than on a small product, so every expert is computed and the routing
weights (zero where not chosen) scale the activations before one down product. The sum over
experts therefore runs in order of expert id inside that product, for every row count alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vkengine.models.layout import MoeWeights
from vkengine.ops.linear import PackedMatrix, pack
from vkengine.ops.norm.cpu import inverse_norm, padded
from vkengine.rows import Rows, Workspace

from .reference import shared_matrices

#: Widest sum of expert widths (shared one included) for which this form pays.
MAX_WIDTH = 4096


@dataclass(slots=True)
class PackedMoe:
    experts: int
    top_k: int
    width: int  # all experts' columns, the shared one last
    unit: int  # one expert's columns
    eps: float
    gain: Tensor  # [H] f32, norm * sqrt(H)
    up: PackedMatrix  # rows: gates of all experts | ups of all | router and shared gate, padded
    down: PackedMatrix
    sizes: list[int]


def can_pack(w: MoeWeights) -> bool:
    """True when the all-experts form fits: equal widths, multiple of 32, and small enough."""
    c = w.config
    unit = c.expert_size
    return (
        unit == c.shared_expert_size
        and unit % 32 == 0
        and unit * (c.num_experts + 1) <= MAX_WIDTH
        and w.gate_up.shape[0] == c.num_experts + 1
    )


def prepare(w: MoeWeights) -> None:
    """Build and pack the two matrices; leaves ``packed`` None when the form does not fit."""
    if not can_pack(w):
        return
    c = w.config
    unit, e = c.expert_size, c.num_experts
    width = unit * (e + 1)
    shared_up, shared_down = shared_matrices(w)
    stacks = [*w.gate_up[:e].float().unbind(), shared_up.float()]
    gates = torch.cat([stack[:unit] for stack in stacks])
    ups = torch.cat([stack[unit:] for stack in stacks])
    router = torch.zeros(padded(e + 1), c.hidden_size)
    router[: e + 1] = w.router.float()
    downs = torch.cat([*w.down[:e].float().unbind(), shared_down.float()], dim=1)
    w.packed = PackedMoe(
        experts=e,
        top_k=c.experts_per_token,
        width=width,
        unit=unit,
        eps=c.hidden_size * c.rms_eps,
        gain=w.norm * c.hidden_size**0.5,
        up=pack(torch.cat([gates, ups, router])),
        down=pack(downs),
        sizes=[width, width, e, padded(e + 1) - e],
    )


@dataclass(slots=True)
class Buffers:
    """Scratch of one row count and its views."""

    act: Tensor  # [R, width]
    act_units: Tensor  # [R, E + 1, unit]
    shares: Tensor  # [R, E + 1, 1]: weight of every expert, zero where not chosen
    routed: Tensor  # [R, E]
    shared: Tensor  # [R, padded - E]: the shared expert's gate first
    sorted: tuple[Tensor, Tensor]  # router logits and ids, best first, [R, E]
    best: Tensor  # [R, k] of sorted
    best_ids: Tensor  # [R, k] of sorted


def _buffers(p: PackedMoe, count: int, ws: Workspace) -> Buffers:
    key = (p.experts, p.top_k, p.unit, count)
    found = ws.views.get(key)
    if found is None:
        e = p.experts
        act = ws.get("moe.act", (count, p.width))
        shares = ws.get("moe.shares", (count, padded(e + 1)))
        values = ws.get("moe.values", (count, e))
        ids = ws.get("moe.ids", (count, e), torch.int64)
        found = Buffers(
            act=act,
            act_units=act.view(count, e + 1, p.unit),
            shares=shares[:, : e + 1, None],
            routed=shares[:, :e],
            shared=shares[:, e:],
            sorted=(values, ids),
            best=values[:, : p.top_k],
            best_ids=ids[:, : p.top_k],
        )
        ws.views[key] = found
    return found


def moe(h: Tensor, w: MoeWeights, state: None, rows: Rows | None, ws: Workspace) -> None:
    """See reference.moe. Router ties go to the lowest id; a NaN row stays NaN with valid ids."""
    p: PackedMoe = w.packed
    b = _buffers(p, h.shape[0], ws)
    y = p.up.apply((h * inverse_norm(h, p.eps)).mul_(p.gain))
    gate, up, router, shared = y.split_with_sizes(p.sizes, 1)
    torch.mul(F.silu(gate), up, out=b.act)
    # Fewer columns than a vector unit, so every row takes the scalar routine at any row count.
    torch.sigmoid(shared, out=b.shared)
    torch.sort(router, dim=1, descending=True, stable=True, out=b.sorted)
    b.routed.zero_().scatter_(1, b.best_ids, torch.softmax(b.best, dim=1))
    b.act_units.mul_(b.shares)
    h += p.down.apply(b.act)
