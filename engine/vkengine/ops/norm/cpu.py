"""The reciprocal root of a row's sum of squares, in the fewest torch calls.

Sizes of element-wise calls matter for exactness on a CPU: torch computes full vectors with one
routine and the tail of a buffer with another, so a row's bits could depend on where the buffer
ends. Here only square, add and reciprocal root run on odd sizes, and those round correctly in
both routines. Everything transcendental runs on widths that are multiples of 32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_norm(x: Tensor, eps: float) -> Tensor:
    """``rsqrt(sum(x^2) + eps)`` over the last dimension, kept as size 1.

    ``rms_norm(x) = x * inverse_norm(x, size * eps) * sqrt(size) * gain``; callers keep the last
    two factors as one vector.
    """
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(eps).rsqrt_()


def padded(width: int, multiple: int = 32) -> int:
    """``width`` rounded up to a multiple."""
    return -(-width // multiple) * multiple
