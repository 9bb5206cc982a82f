"""Dense gated feed-forward."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vkengine.models.layout import MlpWeights
from vkengine.ops.linear import linear
from vkengine.ops.norm import rms_norm
from vkengine.rows import Rows, Workspace


def mlp(h: Tensor, w: MlpWeights, state: None, rows: Rows | None, ws: Workspace) -> None:
    """``h += down(silu(gate x) * up x)`` with ``x = norm(h)``; h [R, H]."""
    x = rms_norm(h, w.norm, w.config.rms_eps)
    gate, up = linear(x, w.gate_up).chunk(2, dim=-1)
    h += linear(F.silu(gate) * up, w.down)
