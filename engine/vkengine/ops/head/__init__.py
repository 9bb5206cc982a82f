"""Final norm, output head, argmax; packed torch on a CPU."""

from __future__ import annotations

from torch import Tensor

from vkengine.models.layout import HeadWeights

from .reference import argmax
from .reference import head as reference_head

__all__ = ["argmax", "head"]


def head(h: Tensor, w: HeadWeights) -> tuple[Tensor, Tensor]:
    """``h [R, H]`` -> (normed hidden [R, H], logits [R, rows] fp32); see reference.py."""
    if w.packed is not None:
        from .cpu import head as run

        return run(h, w)
    return reference_head(h, w)
