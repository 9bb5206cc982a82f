"""Dense gated feed-forward."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...models.layout import MlpWeights
from ...rows import Rows, Workspace
from ..linear import linear
from ..norm import rms_norm


def mlp(h: Tensor, w: MlpWeights, state: None, rows: Rows | None, ws: Workspace) -> None:
    """``h += down(silu(gate x) * up x)`` with ``x = norm(h)``; h [R, H]."""
    x = rms_norm(h, w.norm, w.config.rms_eps)
    gate, up = linear(x, w.gate_up).chunk(2, dim=-1)
    h += linear(F.silu(gate) * up, w.down)
