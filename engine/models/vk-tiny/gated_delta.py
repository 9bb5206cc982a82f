"""Gated delta rule over whole sequences, in chunks, with plain torch operations.

Per value head with state S [K, V]: `S *= exp(g); u = beta (v - S^T k); S += k u^T; o = S^T q`.
Inside a chunk of C tokens the updates solve a unit lower triangular system (the UT transform of
DeltaNet); between chunks the state follows `S' = A S + B`, which `scan` walks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

CHUNK = 64


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for strictly lower triangular L [..., 64, 64], fp32.

    Blocks of 16 by the product form of the Neumann series (nilpotent, so exact), then merged
    pairwise. The series over all 64 rows would lose its digits where keys are alike.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            inverse = _unit_lower_inverse(lower)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allowed
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return (transposed @ gradient @ transposed).neg_().tril_(-1)


def _unit_lower_inverse(lower: Tensor) -> Tensor:
    """The body of `UnitLowerInverse`."""
    size = 16
    blocks = _diagonal_blocks(lower, size)
    power = -blocks
    inverse = torch.eye(size, dtype=lower.dtype, device=lower.device) + power
    for _ in range(3):
        power = power @ power
        inverse = inverse + inverse @ power
    while size < lower.shape[-1]:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = _diagonal_blocks(lower, 2 * size)[..., size:, :size]
        below = -(second @ below @ first)
        top = torch.cat([first, torch.zeros_like(first)], -1)
        inverse = torch.cat([top, torch.cat([below, second], -1)], -2)
        size *= 2
    return inverse.squeeze(-3)


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """[..., n, n] -> [..., n / size, size, size], the blocks on the diagonal."""
    count = matrix.shape[-1] // size
    split = matrix.unflatten(-1, (count, size)).unflatten(-3, (count, size))
    return split.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).contiguous()


class Scan(torch.autograd.Function):
    """States before each chunk: S_0 = 0, S_{n+1} = A_n S_n + B_n; A, B [N, X, K, K or V]."""

    @staticmethod
    def forward(ctx: Any, transition: Tensor, update: Tensor) -> Tensor:
        states = torch.zeros_like(update)
        for n in range(len(update) - 1):
            torch.baddbmm(update[n], transition[n], states[n], out=states[n + 1])
        ctx.save_for_backward(transition, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        transition, states = ctx.saved_tensors
        # carried[n] = dLoss/dS_{n+1}, which is also the gradient of B_n
        carried = torch.zeros_like(states)
        for n in range(len(states) - 2, -1, -1):
            torch.baddbmm(
                gradient[n + 1],
                transition[n + 1].transpose(-1, -2),
                carried[n + 1],
                out=carried[n],
            )
        return carried @ states.transpose(-1, -2), carried


def prepare(
    query: Tensor, key: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Inside each chunk: L, the causal scores, and the summed log decay.

    query, key [B, Hk, 1, N, C, K]; decay, beta [B, Hk, R, N, C]; both results [B, Hk, R, N, C, C].
    """
    total = decay.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).tril()
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~causal, float("-inf"))
    between = between.exp()
    lower = (key @ key.transpose(-1, -2)) * between * beta.unsqueeze(-1)
    scores = (query @ key.transpose(-1, -2)) * between
    return lower.tril(-1), scores, total


def transitions(
    inverse: Tensor, key: Tensor, value: Tensor, total: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Updates U, state readers W, and the chunk's A [.., K, K] and B [.., K, V]."""
    updates = inverse @ (value * beta.unsqueeze(-1))
    readers = inverse @ (key * (beta * total.exp()).unsqueeze(-1))
    last = total[..., -1:]
    decayed = (key * (last - total).exp().unsqueeze(-1)).transpose(-1, -2)
    eye = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device)
    return updates, readers, last.exp().unsqueeze(-1) * eye - decayed @ readers, decayed @ updates


def outputs(
    states: Tensor, query: Tensor, scores: Tensor, total: Tensor, updates: Tensor, readers: Tensor
) -> Tensor:
    """o [B, Hk, R, N, C, V] from the state before the chunk and the updates inside it."""
    from_state = (query * total.exp().unsqueeze(-1)) @ states
    return from_state + scores @ (updates - readers @ states)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """o [B, S, Hv, V] in fp32 for query, key [B, S, Hk, K], value [B, S, Hv, V].

    decay (log space) and beta are [B, S, Hv]. Query and key arrive normalised, the query scaled.
    Key head h serves the value heads h * Hv / Hk and on.
    """
    batch, length, key_heads, _ = key.shape
    value_heads, width = value.shape[-2:]
    ratio = value_heads // key_heads
    padding = -length % CHUNK

    def chunked(x: Tensor, repeat: int) -> Tensor:
        # [B, S, H, ...] -> [B, Hk, repeat, N, C, ...]
        x = F.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, padding)).transpose(1, 2)
        return x.unflatten(2, (-1, CHUNK)).unflatten(1, (key_heads, repeat)).contiguous()

    query, key, value = chunked(query, 1), chunked(key, 1), chunked(value, ratio)
    decay, beta = chunked(decay, ratio), chunked(beta, ratio)
    lower, scores, total = prepare(query, key, decay, beta)
    inverse = UnitLowerInverse.apply(lower)
    updates, readers, transition, update = transitions(inverse, key, value, total, beta)

    def by_chunk(x: Tensor) -> Tensor:
        return x.movedim(3, 0).flatten(1, 3).contiguous()

    states = Scan.apply(by_chunk(transition), by_chunk(update))
    states = states.unflatten(1, (batch, key_heads, ratio)).movedim(0, 3)
    result = outputs(states, query, scores, total, updates, readers)
    result = result.flatten(3, 4)[..., :length, :]  # [B, Hk, R, S, V]
    return result.flatten(1, 2).transpose(1, 2).reshape(batch, length, value_heads, width)
