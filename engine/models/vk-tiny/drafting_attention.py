"""Causal attention for the chained steps of the MTP layer, as they run when drafting.

In step s (counted from 1) the entry at position q attends to the trunk-fed entries 0 .. q-s+1 of
its sequence and to the s-1 entries made since then: the chained entry of step j at q-(s-j), for
j = 2 .. s. Training all positions at once means one causal product over the trunk-fed keys plus
s-1 single keys a row. The two parts are merged by their log-sum-exp; the fused kernel's backward
then gives exact gradients of its part when it is told the merged output and normaliser.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

aten = torch.ops.aten


def _causal(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Output [B, H, S, D], log-sum-exp [B, H, S], and what the backward needs besides."""
    if query.is_cuda:
        result = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False)
        return result[0], result[1], tuple(result[2:8])
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
    return out, lse, ()


def _causal_backward(
    gradient: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    extra: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, out, lse = tensors
    if query.is_cuda:
        cum_q, cum_k, max_q, max_k, seed, offset = extra
        return aten._scaled_dot_product_flash_attention_backward(
            gradient,
            query,
            key,
            value,
            out,
            lse,
            cum_q,
            cum_k,
            max_q,
            max_k,
            0.0,
            True,
            seed,
            offset,
        )
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, out, lse, 0.0, True
    )


class ChainedAttention(torch.autograd.Function):
    """q, k, v [B, H, T, D] and the single keys and values [J, B, H, T, D] of each row.

    Row t attends to keys 0 .. t of `k` and to `near_k[:, :, :, t]`.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, near_k: Tensor, near_v: Tensor
    ) -> Tensor:
        far, far_lse, extra = _causal(q, k, v)
        scores = (q.float() * near_k.float()).sum(-1) * q.shape[-1] ** -0.5  # [J, B, H, T]
        lse = torch.logsumexp(torch.cat([far_lse[None].float(), scores]), 0)
        out = far.float() * (far_lse - lse).exp().unsqueeze(-1)
        weights = (scores - lse).exp()
        out = (out + (weights.unsqueeze(-1) * near_v.float()).sum(0)).to(q.dtype)
        ctx.extra = tuple(x for x in extra if not isinstance(x, Tensor))
        held = [x for x in extra if isinstance(x, Tensor)]
        ctx.kinds = tuple(isinstance(x, Tensor) for x in extra)
        ctx.save_for_backward(q, k, v, near_k, near_v, out, lse, weights, *held)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v, near_k, near_v, out, lse, weights, *held = ctx.saved_tensors
        plain, tensors = iter(ctx.extra), iter(held)
        extra = tuple(next(tensors) if kind else next(plain) for kind in ctx.kinds)
        gradient = gradient.contiguous()
        dq, dk, dv = _causal_backward(gradient, (q, k, v, out, lse.contiguous()), extra)
        mean = (gradient.float() * out.float()).sum(-1)
        slope = weights * ((gradient.float() * near_v.float()).sum(-1) - mean)
        slope = (slope * q.shape[-1] ** -0.5).unsqueeze(-1)
        dq = dq + (slope * near_k.float()).sum(0).to(q.dtype)
        d_near_k = (slope * q.float()).to(q.dtype)
        d_near_v = (weights.unsqueeze(-1) * gradient.float()).to(q.dtype)
        return dq, dk, dv, d_near_k, d_near_v


def chained_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chained: list[tuple[Tensor, Tensor]],
    *,
    fused: bool = True,
) -> Tensor:
    """Attention of one chained step over whole sequences; all tensors [B, H, S, D].

    `key`, `value` are the trunk-fed entries; `chained[j]` holds those of step j + 2, the current
    step last. Rows before position len(chained) have no such step and come out as zeros.
    """
    steps = len(chained)
    length = query.shape[2] - steps
    near_k = torch.stack([k[:, :, j + 1 : j + 1 + length] for j, (k, _) in enumerate(chained)])
    near_v = torch.stack([v[:, :, j + 1 : j + 1 + length] for j, (_, v) in enumerate(chained)])
    query, key, value = (
        query[:, :, steps:].contiguous(),
        key[:, :, :length].contiguous(),
        value[:, :, :length].contiguous(),
    )
    if fused:
        out = ChainedAttention.apply(query, key, value, near_k, near_v)
    else:
        out = _plain(query, key, value, near_k, near_v)
    return torch.nn.functional.pad(out, (0, 0, steps, 0))


def _plain(q: Tensor, k: Tensor, v: Tensor, near_k: Tensor, near_v: Tensor) -> Tensor:
    """What `ChainedAttention` computes, with the whole score matrix in memory."""
    scale = q.shape[-1] ** -0.5
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    far = (q @ k.transpose(-1, -2)).float().masked_fill(later, float("-inf"))
    near = (q.float() * near_k.float()).sum(-1).movedim(0, -1)
    weights = (torch.cat([far, near], -1) * scale).softmax(-1)
    far, near = weights.split([q.shape[2], len(near_k)], -1)
    out = far.to(v.dtype) @ v + (near.movedim(-1, 0).unsqueeze(-1) * near_v.float()).sum(0)
    return out.to(q.dtype)
