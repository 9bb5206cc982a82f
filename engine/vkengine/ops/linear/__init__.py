"""Matrix products whose row results do not depend on how many rows there are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .packed import PackedMatrix, pack

Matrix = Tensor | PackedMatrix

__all__ = ["Matrix", "PackedMatrix", "linear", "matrix_shape", "pack"]


def linear(x: Tensor, w: Matrix) -> Tensor:
    """``x [R, K] f32 @ w [N, K].T -> [R, N] f32``; products accumulate in fp32.

    With a low-precision ``w`` the activations are rounded to its dtype first.
    """
    if isinstance(w, PackedMatrix):
        return w.apply(x)
    if w.dtype == torch.float32:
        return F.linear(x, w)
    if w.is_cuda:
        return torch.mm(x.to(w.dtype), w.t(), out_dtype=torch.float32)
    return F.linear(x.to(w.dtype).float(), w.float())


def matrix_shape(w: Matrix) -> tuple[int, int]:
    """(N, K) of a matrix in either form."""
    if isinstance(w, PackedMatrix):
        return w.shape
    return (w.shape[0], w.shape[1])
