"""The blocks of Qwen3.5-MoE between its attention kernels, as functions of tensors.

Shapes: B sequences, S positions, H hidden. Activations run in the dtype given; the residual
stream h, norms, router, gates and recurrent state are fp32. Callers name these functions through
the module (`blocks.moe`), so that `compile_blocks` can put fused ones in their place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import gated_delta
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Config:
    """The fields of config.json that the arithmetic depends on."""

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    partial_rotary_factor: float
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    rms_norm_eps: float

    @classmethod
    def read(cls, path: Path) -> Config:
        """From a config.json; the rest of its keys are for other readers."""
        raw = json.loads(path.read_text())
        raw["rope_theta"] = raw["rope_parameters"]["rope_theta"]
        raw["layer_types"] = tuple(raw["layer_types"])
        return cls(**{field.name: raw[field.name] for field in fields(cls)})


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in x's dtype, from fp32 master weights."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Zero-centred: x / rms * (1 + gain), computed in fp32."""
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + gain)).to(dtype)


def unit(x: Tensor) -> Tensor:
    """L2-normalised over the last dimension, fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding of the first dimensions of x [B, S, heads, D]."""
    width = cos.shape[-1]
    first, second, rest = x[..., :width], x[..., width : 2 * width], x[..., 2 * width :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def gdn_inputs(
    h: Tensor,
    gain: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    config: Config,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, log decay, beta and the output gate z of a gated DeltaNet layer."""
    x = rms_norm(h, gain, config.rms_norm_eps, dtype)
    qkv, z, b, a = (linear(x, weight) for weight in weights)
    length, kernel = h.shape[1], conv.shape[-1]
    padded = F.pad(qkv.float(), (0, 0, kernel - 1, 0))
    mixed = padded[:, :length] * conv[:, 0, 0]
    for tap in range(1, kernel):
        mixed = mixed + padded[:, tap : tap + length] * conv[:, 0, tap]
    mixed = F.silu(mixed)
    key_dim = config.linear_num_key_heads * config.linear_key_head_dim
    q, k, v = mixed.split([key_dim, key_dim, mixed.shape[-1] - 2 * key_dim], -1)
    width = config.linear_key_head_dim
    q = unit(q.unflatten(-1, (-1, width))) * width**-0.5
    k = unit(k.unflatten(-1, (-1, width)))
    v = v.unflatten(-1, (-1, config.linear_value_head_dim))
    decay = -a_log.exp() * F.softplus(a.float() + dt_bias)
    return q, k, v, decay, b.float().sigmoid(), z


def gdn_output(
    h: Tensor, mixed: Tensor, z: Tensor, gain: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Gated norm per head (plain gain), output projection, residual."""
    gate = F.silu(z.float().unflatten(-1, (-1, mixed.shape[-1])))
    x = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + eps) * gain * gate
    return h + linear(x.flatten(-2).to(z.dtype), weight)


def attention_inputs(
    h: Tensor,
    gain: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    head_gains: tuple[Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    config: Config,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [B, heads, S, D] (keys and values repeated for each query head) and the gate."""
    width, eps = config.head_dim, config.rms_norm_eps
    x = rms_norm(h, gain, eps, dtype)
    q, k, v = (linear(x, weight) for weight in weights)
    q, gate = q.unflatten(-1, (config.num_attention_heads, 2 * width)).chunk(2, -1)
    k = k.unflatten(-1, (config.num_key_value_heads, width))
    v = v.unflatten(-1, (config.num_key_value_heads, width))
    q = rotate(rms_norm(q, head_gains[0], eps, torch.float32), *angles).to(dtype)
    k = rotate(rms_norm(k, head_gains[1], eps, torch.float32), *angles).to(dtype)
    repeat = config.num_attention_heads // config.num_key_value_heads
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    q, k, v = (y.transpose(1, 2).contiguous() for y in (q, k, v))
    return q, k, v, gate.flatten(-2)


def attention_output(h: Tensor, attended: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Sigmoid gate, output projection, residual; attended [B, heads, S, D]."""
    x = attended.transpose(1, 2).flatten(-2) * gate.float().sigmoid()
    return h + linear(x.to(gate.dtype), weight)


def moe(
    h: Tensor,
    gain: Tensor,
    router: Tensor,
    experts: tuple[Tensor, Tensor],
    shared: tuple[Tensor, Tensor, Tensor],
    shared_gate: Tensor,
    config: Config,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """All experts and the shared one by two products; also the load-balancing loss.

    The loss is experts * sum(share of the choices * mean probability): 1 when balanced.
    """
    x = rms_norm(h, gain, config.rms_norm_eps, dtype)
    probabilities = F.linear(x.float(), router).softmax(-1)
    chosen = torch.zeros_like(probabilities)
    for _ in range(config.num_experts_per_tok):  # ties to the lowest expert
        best = (probabilities - 2 * chosen).argmax(-1, keepdim=True)
        chosen = chosen + torch.zeros_like(chosen).scatter(-1, best, 1.0)
    share = chosen.flatten(0, -2).mean(0) / config.num_experts_per_tok
    balance = config.num_experts * (share * probabilities.flatten(0, -2).mean(0)).sum()
    weights = probabilities * chosen
    weights = weights / weights.sum(-1, keepdim=True)
    weights = torch.cat([weights, F.linear(x.float(), shared_gate).sigmoid()], -1)
    gate_up = torch.cat([experts[0], torch.cat(shared[:2])[None]])  # [E + 1, 2 I, H]
    down = torch.cat([experts[1], shared[2][None]])  # [E + 1, H, I]
    inner = linear(x, gate_up.flatten(0, 1)).unflatten(-1, gate_up.shape[:2])
    gate, up = inner.float().chunk(2, -1)
    inner = (F.silu(gate) * up * weights.unsqueeze(-1)).to(dtype).flatten(-2)
    return h + linear(inner, down.transpose(0, 1).flatten(1)), balance


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, skip: int) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and accuracy over positions from `skip` on; x [B, S, H]."""
    logits = linear(x, weight).float()
    loss = logits.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    right = (logits.argmax(-1) == targets).float()
    return loss[:, skip:].mean(), right[:, skip:].mean()


def compile_blocks(on: bool) -> None:
    """Fuse the functions between the attention kernels, or put the plain ones back."""
    for name, function in _PLAIN.items():
        globals()[name] = torch.compile(function, dynamic=False) if on else function
    for name, function in _PLAIN_CHUNKS.items():
        fused = torch.compile(function, dynamic=False) if on else function
        setattr(gated_delta, name, fused)


_PLAIN: dict[str, Callable[..., object]] = {
    f.__name__: f
    for f in (gdn_inputs, gdn_output, attention_inputs, attention_output, moe, head_loss)
}
_PLAIN_CHUNKS: dict[str, Callable[..., object]] = {
    f.__name__: f for f in (gated_delta.prepare, gated_delta.transitions, gated_delta.outputs)
}
