"""Packing a model's weights for the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor

from vkengine.ops.attention.cpu import prepare as prepare_attention
from vkengine.ops.attention.cpu import rotation_table
from vkengine.ops.gdn.cpu import prepare as prepare_gdn
from vkengine.ops.head.cpu import prepare as prepare_head
from vkengine.ops.mlp.cpu import prepare as prepare_mlp
from vkengine.ops.moe.cpu import prepare as prepare_moe

from .layout import (
    GdnWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
)


def _prepare_layer(layer: LayerWeights, turns: Tensor | None, release: bool) -> Tensor | None:
    mixer, ffn = layer.mixer, layer.ffn
    gone = torch.empty(0)
    if isinstance(mixer, GdnWeights):
        prepare_gdn(mixer)
        if release:
            mixer.w_in = mixer.w_out = gone
    else:
        if turns is None:
            turns = rotation_table(mixer)
        prepare_attention(mixer, turns)
        if release:
            mixer.w_qkv = mixer.w_o = gone
    if isinstance(ffn, MoeWeights):
        prepare_moe(ffn)
        if release and ffn.packed is not None:
            ffn.gate_up = ffn.down = gone
    else:
        prepare_mlp(ffn)
        if release:
            ffn.gate_up = ffn.down = gone
    return turns


def prepare_cpu(weights: ModelWeights, release: bool = True) -> None:
    """Fill every ``packed`` field. ``release`` drops the matrices that packing replaced
    and the MTP module (build its drafter first).
    """
    turns: Tensor | None = None
    for layer in weights.layers:
        turns = _prepare_layer(layer, turns, release)
    head = weights.head
    if isinstance(head.weight, Tensor):
        prepare_head(head)
        if release and head.weight is not weights.embed:
            head.weight = torch.empty(0)
    if release:
        weights.mtp = None
