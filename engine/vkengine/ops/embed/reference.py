"""Token rows of the embedding matrix as the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """``tokens [R] i64, weight [V, H] -> [R, H] f32``. Ids outside the vocabulary raise."""
    return torch.nn.functional.embedding(tokens, weight).float()
