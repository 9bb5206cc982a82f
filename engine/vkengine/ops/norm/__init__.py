"""Root-mean-square norms."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * gain`` over the last dimension, fp32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x * rsqrt(sum(x^2) + eps)`` over the last dimension, fp32."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
