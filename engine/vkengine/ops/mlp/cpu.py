"""Dense feed-forward on packed matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vkengine.models.layout import MlpWeights
from vkengine.ops.linear import PackedMatrix, pack
from vkengine.ops.norm.cpu import inverse_norm
from vkengine.rows import Rows, Workspace


@dataclass(slots=True)
class PackedMlp:
    size: int
    eps: float
    gain: Tensor  # [H] f32, norm * sqrt(H)
    gate_up: PackedMatrix
    down: PackedMatrix


def prepare(w: MlpWeights) -> None:
    """Pack both matrices."""
    c = w.config
    assert isinstance(w.gate_up, Tensor) and isinstance(w.down, Tensor)
    gain = w.norm * c.hidden_size**0.5
    eps = c.hidden_size * c.rms_eps
    w.packed = PackedMlp(w.down.shape[1], eps, gain, pack(w.gate_up), pack(w.down))


def mlp(h: Tensor, w: MlpWeights, state: None, rows: Rows | None, ws: Workspace) -> None:
    """See reference.mlp."""
    p: PackedMlp = w.packed
    y = p.gate_up.apply((h * inverse_norm(h, p.eps)).mul_(p.gain))
    gate, up = y.chunk(2, 1)
    h += p.down.apply(torch.mul(F.silu(gate), up))
