"""Final norm and output head."""

from __future__ import annotations

import torch
from torch import Tensor

from vkengine.models.layout import HeadWeights
from vkengine.ops.linear import linear
from vkengine.ops.norm import rms_norm


def head(h: Tensor, w: HeadWeights) -> tuple[Tensor, Tensor]:
    """``h [R, H]`` -> (normed hidden [R, H], logits [R, rows] fp32).

    The hidden state after the final norm is what the MTP module takes.
    """
    x = rms_norm(h, w.norm, w.config.rms_eps)
    return x, linear(x, w.weight)


def argmax(scores: Tensor, ids: Tensor | None) -> Tensor:
    """``scores [R, rows]`` -> vocabulary ids [R] i64; ties to the lowest id, NaN rows to an id."""
    best = torch.argmax(scores, dim=-1)
    return best if ids is None else ids[best]
