"""Qwen3.5-MoE with its MTP layer, whole sequences only: the training module of vk-tiny.

Parameter names are those of the checkpoint, the arithmetic is that of transformers'
Qwen3_5MoeForCausalLM (evaluate.py compares the logits). Two things differ in form only:
the experts are all computed and weighted, zero weight where not chosen, which for eight small
experts is two matrix products; and the linear attention runs in chunks (gated_delta.py).
"""

from __future__ import annotations

import math

import blocks
import gated_delta
import torch
from blocks import Config, linear, rms_norm
from drafting_attention import chained_attention
from torch import Tensor, nn
from torch.nn import functional as F


class Weight(nn.Module):
    """A bare parameter under the name `<module>.weight`."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


def _normal(*shape: int, std: float) -> Tensor:
    return torch.empty(*shape).normal_(0.0, std)


class GatedDeltaNet(nn.Module):
    """Linear attention: the parameters of `linear_attn` and the block's first half."""

    def __init__(self, config: Config, std: float, out_std: float) -> None:
        super().__init__()
        hidden, value_heads = config.hidden_size, config.linear_num_value_heads
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = value_heads * config.linear_value_head_dim
        conv = 2 * keys + values
        kernel = config.linear_conv_kernel_dim
        self.in_proj_qkv = Weight(_normal(conv, hidden, std=std))
        self.in_proj_z = Weight(_normal(values, hidden, std=std))
        self.in_proj_b = Weight(_normal(value_heads, hidden, std=std))
        self.in_proj_a = Weight(_normal(value_heads, hidden, std=std))
        self.conv1d = Weight(torch.empty(conv, 1, kernel).uniform_(-(kernel**-0.5), kernel**-0.5))
        # Mamba-2's start: decay rates over three decades, so some heads remember far back.
        rate = torch.exp(torch.empty(value_heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(rate + torch.log(-torch.expm1(-rate)))
        self.A_log = nn.Parameter(torch.empty(value_heads).uniform_(1, 16).log())
        self.norm = Weight(torch.ones(config.linear_value_head_dim))
        self.out_proj = Weight(_normal(hidden, values, std=out_std))

    def forward(self, h: Tensor, gain: Tensor, config: Config, dtype: torch.dtype) -> Tensor:
        """Norm, mixer and residual on h [B, S, H]."""
        projections = (
            self.in_proj_qkv.weight,
            self.in_proj_z.weight,
            self.in_proj_b.weight,
            self.in_proj_a.weight,
        )
        q, k, v, decay, beta, z = blocks.gdn_inputs(
            h,
            gain,
            projections,
            self.conv1d.weight,
            self.A_log,
            self.dt_bias,
            config,
            dtype,
        )
        mixed = gated_delta.gated_delta_rule(q, k, v, decay, beta)
        return blocks.gdn_output(
            h, mixed, z, self.norm.weight, self.out_proj.weight, config.rms_norm_eps
        )


class Attention(nn.Module):
    """Gated full attention: the parameters of `self_attn` and the block's first half."""

    def __init__(self, config: Config, std: float, out_std: float) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        queries = config.num_attention_heads * width
        keys = config.num_key_value_heads * width
        self.q_proj = Weight(_normal(2 * queries, hidden, std=std))
        self.k_proj = Weight(_normal(keys, hidden, std=std))
        self.v_proj = Weight(_normal(keys, hidden, std=std))
        self.o_proj = Weight(_normal(hidden, queries, std=out_std))
        self.q_norm = Weight(torch.zeros(width))
        self.k_norm = Weight(torch.zeros(width))

    def inputs(
        self,
        h: Tensor,
        gain: Tensor,
        angles: tuple[Tensor, Tensor],
        config: Config,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `blocks.attention_inputs`."""
        weights = (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        gains = (self.q_norm.weight, self.k_norm.weight)
        return blocks.attention_inputs(h, gain, weights, gains, angles, config, dtype)


class Experts(nn.Module):
    """The fused expert tensors, which carry no `.weight`."""

    def __init__(self, config: Config, std: float, out_std: float) -> None:
        super().__init__()
        count, inner, hidden = (
            config.num_experts,
            config.moe_intermediate_size,
            config.hidden_size,
        )
        self.gate_up_proj = nn.Parameter(_normal(count, 2 * inner, hidden, std=std))
        self.down_proj = nn.Parameter(_normal(count, hidden, inner, std=out_std))


class SharedExpert(nn.Module):
    """The expert that every token passes."""

    def __init__(self, config: Config, std: float, out_std: float) -> None:
        super().__init__()
        inner, hidden = config.moe_intermediate_size, config.hidden_size
        self.gate_proj = Weight(_normal(inner, hidden, std=std))
        self.up_proj = Weight(_normal(inner, hidden, std=std))
        self.down_proj = Weight(_normal(hidden, inner, std=out_std))


class Moe(nn.Module):
    """The parameters of `mlp` and the block's second half."""

    def __init__(self, config: Config, std: float, out_std: float) -> None:
        super().__init__()
        self.gate = Weight(_normal(config.num_experts, config.hidden_size, std=std))
        self.experts = Experts(config, std, out_std)
        self.shared_expert = SharedExpert(config, std, out_std)
        self.shared_expert_gate = Weight(_normal(1, config.hidden_size, std=std))

    def forward(
        self, h: Tensor, gain: Tensor, config: Config, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Norm, experts and residual on h [B, S, H]; see `blocks.moe`."""
        shared = self.shared_expert
        return blocks.moe(
            h,
            gain,
            self.gate.weight,
            (self.experts.gate_up_proj, self.experts.down_proj),
            (shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight),
            self.shared_expert_gate.weight,
            config,
            dtype,
        )


class Layer(nn.Module):
    """One decoder layer; `kind` is an entry of config.layer_types."""

    linear_attn: GatedDeltaNet
    self_attn: Attention
    mlp: Moe
    input_layernorm: Weight
    post_attention_layernorm: Weight

    def __init__(self, config: Config, kind: str, std: float, out_std: float) -> None:
        super().__init__()
        self.input_layernorm = Weight(torch.zeros(config.hidden_size))
        self.post_attention_layernorm = Weight(torch.zeros(config.hidden_size))
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(config, std, out_std)
        else:
            self.self_attn = Attention(config, std, out_std)
        self.mlp = Moe(config, std, out_std)


class Trunk(nn.Module):
    """The parameters under `model.`."""

    def __init__(self, config: Config, std: float, out_std: float) -> None:
        super().__init__()
        self.embed_tokens = Weight(_normal(config.vocab_size, config.hidden_size, std=0.02))
        self.layers = nn.ModuleList(
            Layer(config, kind, std, out_std) for kind in config.layer_types
        )
        self.norm = Weight(torch.zeros(config.hidden_size))


def layers_of(stack: nn.ModuleList) -> list[Layer]:
    """The stack with its type."""
    return [layer for layer in stack if isinstance(layer, Layer)]


class Mtp(nn.Module):
    """The parameters under `mtp.`: one gated-attention layer that drafts the token after next."""

    def __init__(self, config: Config, std: float, out_std: float) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = Weight(_normal(hidden, 2 * hidden, std=std))
        self.pre_fc_norm_embedding = Weight(torch.zeros(hidden))
        self.pre_fc_norm_hidden = Weight(torch.zeros(hidden))
        self.layers = nn.ModuleList([Layer(config, "full_attention", std, out_std)])
        self.norm = Weight(torch.zeros(hidden))


class Network(nn.Module):
    """vk-tiny; `dtype` is that of the activations, parameters stay fp32."""

    def __init__(self, config: Config, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.fused_chain = True
        std = 0.6 * config.hidden_size**-0.5
        out_std = std / math.sqrt(2 * len(config.layer_types))
        self.model = Trunk(config, std, out_std)
        self.mtp = Mtp(config, std, out_std)

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [S, rotary / 2], fp32."""
        config = self.config
        width = int(config.head_dim * config.partial_rotary_factor)
        device = self.model.norm.weight.device
        steps = torch.arange(0, width, 2, device=device).float() / width
        angle = torch.arange(length, device=device).float()[:, None] / config.rope_theta**steps
        return angle.cos(), angle.sin()

    def trunk(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states after the final norm [B, S, H] fp32; the summed balance loss."""
        config, dtype = self.config, self.dtype
        angles = self.angles(tokens.shape[1])
        h = F.embedding(tokens, self.model.embed_tokens.weight)
        balance = h.new_zeros(())
        for layer in layers_of(self.model.layers):
            gain = layer.input_layernorm.weight
            if hasattr(layer, "linear_attn"):
                h = layer.linear_attn(h, gain, config, dtype)
            else:
                attention = layer.self_attn
                q, k, v, gate = attention.inputs(h, gain, angles, config, dtype)
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                h = blocks.attention_output(h, mixed, gate, attention.o_proj.weight)
            h, layer_balance = layer.mlp(h, layer.post_attention_layernorm.weight, config, dtype)
            balance = balance + layer_balance
        eps = config.rms_norm_eps
        return rms_norm(h, self.model.norm.weight, eps, torch.float32), balance

    def drafts(self, hidden: Tensor, following: Tensor, steps: int) -> tuple[list[Tensor], Tensor]:
        """Post-norm outputs [B, S, H] of `steps` chained MTP steps; the summed balance loss.

        hidden: the trunk's output at positions 0 .. S-1; following: the tokens at 1 .. S.
        Step s at position q predicts token q + 2; it is meaningful from q = s - 1 on.
        """
        config, dtype, mtp = self.config, self.dtype, self.mtp
        eps = config.rms_norm_eps
        angles = self.angles(following.shape[1])
        embedded = F.embedding(following, self.model.embed_tokens.weight)
        embedded = rms_norm(embedded, mtp.pre_fc_norm_embedding.weight, eps, dtype)
        (layer,) = layers_of(mtp.layers)
        attention = layer.self_attn
        results: list[Tensor] = []
        chained: list[tuple[Tensor, Tensor]] = []
        far_k = far_v = hidden  # set in the first step
        balance = hidden.new_zeros(())
        for step in range(steps):
            normed = rms_norm(hidden, mtp.pre_fc_norm_hidden.weight, eps, dtype)
            h = linear(torch.cat([embedded, normed], -1), mtp.fc.weight).float()
            gain = layer.input_layernorm.weight
            q, k, v, gate = attention.inputs(h, gain, angles, config, dtype)
            if step == 0:
                far_k, far_v = k, v
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                chained.append((k, v))
                mixed = chained_attention(q, far_k, far_v, chained, fused=self.fused_chain)
            h = blocks.attention_output(h, mixed, gate, attention.o_proj.weight)
            h, step_balance = layer.mlp(h, layer.post_attention_layernorm.weight, config, dtype)
            balance = balance + step_balance
            results.append(rms_norm(h, mtp.norm.weight, eps, torch.float32))
            hidden = F.pad(results[-1][:, :-1], (0, 0, 1, 0))
        return results, balance

    def logits(self, hidden: Tensor) -> Tensor:
        """The shared head on post-norm states."""
        return linear(hidden.to(self.dtype), self.model.embed_tokens.weight)

    def losses(self, tokens: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-entropy and accuracy of [trunk, step 1 .. steps], and the mean balance loss.

        tokens [B, S + 2].
        """
        length = tokens.shape[1] - 2
        hidden, balance = self.trunk(tokens[:, :length])
        drafted, draft_balance = self.drafts(hidden, tokens[:, 1 : length + 1], steps)
        weight = self.model.embed_tokens.weight
        following = tokens[:, 1 : length + 1].contiguous()
        results = [blocks.head_loss(hidden.to(self.dtype), weight, following, 0)]
        targets = tokens[:, 2:].contiguous()
        for step, states in enumerate(drafted):
            results.append(blocks.head_loss(states.to(self.dtype), weight, targets, step))
        losses, right = (torch.stack(x) for x in zip(*results, strict=True))
        layers = len(self.model.layers) + steps
        return losses, right, (balance + draft_balance) / layers
