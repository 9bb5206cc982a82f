"""Compare drafts with the target's tokens and commit the round."""

from __future__ import annotations

import torch
from torch import Tensor


def accept(tokens: Tensor, y: Tensor, limit: Tensor, forced: Tensor | None = None) -> Tensor:
    """Count the leading drafts that agree. Returns n [B] i64 in 0..limit.

    ``tokens [B, M]``: last committed token, then M-1 drafts. ``y [B, M]``: the target's token
    after each row. ``limit [B]``: drafts really proposed. ``forced [B, M-1]`` bool replaces the
    comparison (synthetic acceptance) and nothing else.
    """
    agree = tokens[:, 1:] == y[:, :-1] if forced is None else forced
    columns = torch.arange(agree.shape[1], device=y.device)
    agree = agree & (columns < limit[:, None])
    return agree.long().cumprod(dim=1).sum(dim=1)
