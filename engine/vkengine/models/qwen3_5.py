"""The Qwen3.5 family (dense and MoE) over the rows of one round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vkengine.ops.attention import attention
from vkengine.ops.attention import cpu as attention_cpu
from vkengine.ops.embed import embed
from vkengine.ops.gdn import cpu as gdn_cpu
from vkengine.ops.gdn import gdn
from vkengine.ops.head import head
from vkengine.ops.mlp import cpu as mlp_cpu
from vkengine.ops.mlp import mlp
from vkengine.ops.moe import cpu as moe_cpu
from vkengine.ops.moe import moe
from vkengine.rows import Rows, Workspace
from vkengine.state import State

from .layout import AttentionWeights, GdnWeights, MlpWeights, ModelWeights, MoeWeights

Block = Callable[[Tensor, Any, Any, Rows, Workspace], None]
#: One block after another: the op, its weights, its state (None for feed-forward).
Plan = list[tuple[Block, Any, Any]]


def make_plan(weights: ModelWeights, state: State) -> Plan:
    """The blocks of all layers in order, each with the op that this device and packing take."""
    plan: Plan = []
    for layer, layer_state in zip(weights.layers, state.layers, strict=True):
        for part, part_state in ((layer.mixer, layer_state), (layer.ffn, None)):
            if part.packed is not None:
                plan.append((_PACKED[type(part)], part, part_state))
            else:
                plan.append((_BLOCKS[type(part)], part, part_state))
    return plan


_BLOCKS: dict[type, Block] = {
    GdnWeights: gdn,
    AttentionWeights: attention,
    MoeWeights: moe,
    MlpWeights: mlp,
}
_PACKED: dict[type, Block] = {
    GdnWeights: gdn_cpu.gdn,
    AttentionWeights: attention_cpu.attention,
    MoeWeights: moe_cpu.moe,
    MlpWeights: mlp_cpu.mlp,
}


def trunk(plan: Plan, embedding: Tensor, tokens: Tensor, rows: Rows, ws: Workspace) -> Tensor:
    """All layers over ``tokens [R] i64``; returns the residual stream [R, H] before the norm.

    Recurrent layers fold what lies below each sequence's ``pos0`` into their state; the caller
    then moves ``state.folded`` (:func:`mark_folded`).
    """
    h = embed(tokens, embedding)
    for block, weights, state in plan:
        block(h, weights, state, rows, ws)
    return h


def mark_folded(state: State, rows: Rows, block: int) -> None:
    """Record that every layer has folded tokens below pos0 rounded down to ``block``."""
    if rows.host is not None:
        for slot, pos in rows.host:
            state.folded[slot] = pos & -block
        return
    target = rows.pos0 if block == 1 else rows.pos0 & -block
    state.folded.index_copy_(0, rows.slot.long(), target.to(torch.int32))


def logits_of(h: Tensor, weights: ModelWeights) -> tuple[Tensor, Tensor]:
    """``h [R, H]`` -> (hidden after the final norm [R, H], logits [R, V]), both fp32."""
    return head(h, weights.head)
