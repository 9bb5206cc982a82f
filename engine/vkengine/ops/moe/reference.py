"""Mixture-of-experts feed-forward: router, top-k, experts in rank order, shared expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vkengine.models.layout import MoeWeights
from vkengine.ops.linear import linear
from vkengine.ops.norm import rms_norm
from vkengine.rows import Rows, Workspace


def route(x: Tensor, w: MoeWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Router in fp32. Returns expert ids [R, k] (best first, ties to the lowest id), their
    renormalised weights [R, k] and the shared expert's sigmoid gate [R, 1].

    Ids are valid for every input; a NaN row gets NaN weights.
    """
    logits = F.linear(x, w.router.float())
    e = w.config.num_experts
    probs = torch.softmax(logits[:, :e], dim=-1)
    ids, weights = top_k(probs, w.config.experts_per_token)
    return ids, weights / weights.sum(-1, keepdim=True), torch.sigmoid(logits[:, e:])


def top_k(probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, best first, ties to the lowest index. ids i64, values."""
    values, ids = torch.sort(probs, dim=-1, descending=True, stable=True)
    return ids[:, :k], values[:, :k]


def shared_matrices(w: MoeWeights) -> tuple[Tensor, Tensor]:
    """The shared expert's gate_up [2*Is, H] and down [H, Is], stacked with the rest or not."""
    if w.shared_gate_up is not None and w.shared_down is not None:
        return w.shared_gate_up, w.shared_down
    e = w.config.num_experts
    return w.gate_up[e], w.down[e]


def expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """``down(silu(gate x) * up x)``: x [R, H] -> [R, H]."""
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, down)


def moe(h: Tensor, w: MoeWeights, state: None, rows: Rows | None, ws: Workspace) -> None:
    """Add the layer's output to ``h [R, H]``: experts summed in rank order, then the shared one.

    Each (row, rank) pair is computed by itself, so a row's bits are its own.
    """
    x = rms_norm(h, w.norm, w.config.rms_eps)
    ids, weights, gate = route(x, w)
    shared_up, shared_down = shared_matrices(w)
    for r in range(h.shape[0]):
        row = x[r : r + 1]
        total = torch.zeros_like(row)
        for rank in range(ids.shape[1]):
            e = ids[r, rank]
            total += weights[r, rank] * expert(row, w.gate_up[e], w.down[e])
        h[r : r + 1] += total + gate[r] * expert(row, shared_up, shared_down)


def moe_unit(h: Tensor, w: MoeWeights) -> None:
    """The same for the rows of one prefill unit: one pass per expert that any row chose."""
    x = rms_norm(h, w.norm, w.config.rms_eps)
    ids, weights, gate = route(x, w)
    ranked = torch.zeros(*ids.shape, h.shape[1], device=h.device)  # [R, k, H]
    for e in torch.unique(ids).tolist():
        row, rank = torch.nonzero(ids == e, as_tuple=True)
        ranked[row, rank] = expert(x[row], w.gate_up[e], w.down[e])
    total = torch.zeros_like(h)
    for rank in range(ids.shape[1]):
        total += weights[:, rank, None] * ranked[:, rank]
    shared_up, shared_down = shared_matrices(w)
    h += total + gate * expert(x, shared_up, shared_down)
