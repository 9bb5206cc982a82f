"""Output head on a packed matrix."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vkengine.models.layout import HeadWeights
from vkengine.ops.linear import PackedMatrix, pack
from vkengine.ops.norm.cpu import inverse_norm


@dataclass(slots=True)
class PackedHead:
    eps: float
    gain: Tensor  # [H] f32, norm * sqrt(H)
    matrix: PackedMatrix


def prepare(w: HeadWeights) -> None:
    """Pack the head."""
    c = w.config
    assert isinstance(w.weight, Tensor)
    gain = w.norm * c.hidden_size**0.5
    w.packed = PackedHead(c.hidden_size * c.rms_eps, gain, pack(w.weight))


def head(h: Tensor, w: HeadWeights) -> tuple[Tensor, Tensor]:
    """See reference.head."""
    p: PackedHead = w.packed
    x = (h * inverse_norm(h, p.eps)).mul_(p.gain)
    return x, p.matrix.apply(x)
