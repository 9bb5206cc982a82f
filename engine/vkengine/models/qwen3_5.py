"""The Qwen3.5 family (dense and MoE) over the rows of one round."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.attention import attention
from ..ops.embed import embed
from ..ops.gdn import gdn
from ..ops.head import head
from ..ops.mlp import mlp
from ..ops.moe import moe
from ..rows import Rows, Workspace
from ..state import AttentionState, State
from .layout import GdnWeights, LayerWeights, ModelWeights, MoeWeights


def feed_forward(h: Tensor, layer: LayerWeights, rows: Rows, ws: Workspace) -> None:
    """``h += ffn(norm(h))`` of either kind; h [R, H] f32."""
    if isinstance(layer.ffn, MoeWeights):
        moe(h, layer.ffn, None, rows, ws)
    else:
        mlp(h, layer.ffn, None, rows, ws)


def trunk(
    weights: ModelWeights, state: State, tokens: Tensor, rows: Rows, ws: Workspace
) -> Tensor:
    """All layers over ``tokens [R] i64``; returns the residual stream [R, H] before the norm.

    Recurrent layers fold what lies below each sequence's ``pos0`` into their state; the caller
    then moves ``state.folded`` (:func:`mark_folded`).
    """
    h = embed(tokens, weights.embed)
    for layer, layer_state in zip(weights.layers, state.layers, strict=True):
        if isinstance(layer.mixer, GdnWeights):
            assert not isinstance(layer_state, AttentionState)
            gdn(h, layer.mixer, layer_state, rows, ws)
        else:
            assert isinstance(layer_state, AttentionState)
            attention(h, layer.mixer, layer_state, rows, ws)
        feed_forward(h, layer, rows, ws)
    return h


def mark_folded(state: State, rows: Rows, block: int) -> None:
    """Record that every layer has folded tokens below pos0 rounded down to ``block``."""
    target = rows.pos0 if block == 1 else rows.pos0 & -block
    state.folded.index_copy_(0, rows.slot.long(), target.to(torch.int32))


def logits_of(h: Tensor, weights: ModelWeights) -> tuple[Tensor, Tensor]:
    """``h [R, H]`` -> (hidden after the final norm [R, H], logits [R, V]), both fp32."""
    return head(h, weights.head)
