"""Assembling merged weights from single named tensors, wherever those come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vkengine.config import ModelConfig

from .layout import (
    AttentionWeights,
    GdnWeights,
    HeadWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
)

#: name, shape -> tensor. The builder asks one for everything it needs.
Source = Callable[[str, tuple[int, ...]], Tensor]


@dataclass(slots=True)
class Builder:
    """Assembles merged weights from single tensors on ``device`` in ``dtype``."""

    config: ModelConfig
    source: Source
    device: torch.device
    dtype: torch.dtype
    cos: Tensor
    sin: Tensor
    per_expert: Callable[[str], bool] = field(default=lambda _prefix: False)

    def matrix(self, name: str, *shape: int) -> Tensor:
        return self.source(name, shape).to(self.device, self.dtype)

    def vector(self, name: str, *shape: int) -> Tensor:
        return self.source(name, shape).to(self.device, torch.float32)

    def gain(self, name: str, size: int) -> Tensor:
        return self.vector(name, size) + 1.0

    def gdn(self, at: str) -> GdnWeights:
        c = self.config
        h, hv, at_ = c.hidden_size, c.gdn_value_heads, f"{at}linear_attn."
        rows = {
            "in_proj_qkv": c.conv_dim,
            "in_proj_z": c.value_size,
            "in_proj_b": hv,
            "in_proj_a": hv,
        }
        parts = [self.matrix(f"{at_}{name}.weight", n, h) for name, n in rows.items()]
        return GdnWeights(
            config=c,
            norm=self.gain(f"{at}input_layernorm.weight", h),
            w_in=torch.cat(parts),
            conv=self.vector(f"{at_}conv1d.weight", c.conv_dim, 1, c.conv_width)[:, 0],
            a_log=self.vector(f"{at_}A_log", hv),
            dt_bias=self.vector(f"{at_}dt_bias", hv),
            gate_norm=self.vector(f"{at_}norm.weight", c.gdn_value_dim),
            w_out=self.matrix(f"{at_}out_proj.weight", h, c.value_size),
        )

    def attention(self, at: str) -> AttentionWeights:
        c = self.config
        h, d, at_ = c.hidden_size, c.head_dim, f"{at}self_attn."
        rows = {"q_proj": 2 * c.num_heads * d, "k_proj": c.num_kv_heads * d}
        rows["v_proj"] = rows["k_proj"]
        parts = [self.matrix(f"{at_}{name}.weight", n, h) for name, n in rows.items()]
        return AttentionWeights(
            config=c,
            norm=self.gain(f"{at}input_layernorm.weight", h),
            w_qkv=torch.cat(parts),
            q_norm=self.gain(f"{at_}q_norm.weight", d),
            k_norm=self.gain(f"{at_}k_norm.weight", d),
            w_o=self.matrix(f"{at_}o_proj.weight", h, c.num_heads * d),
            cos=self.cos,
            sin=self.sin,
        )

    def mlp(self, at: str) -> MlpWeights:
        c = self.config
        h, i = c.hidden_size, c.intermediate_size
        parts = [self.matrix(f"{at}mlp.{name}_proj.weight", i, h) for name in ("gate", "up")]
        return MlpWeights(
            config=c,
            norm=self.gain(f"{at}post_attention_layernorm.weight", h),
            gate_up=torch.cat(parts),
            down=self.matrix(f"{at}mlp.down_proj.weight", h, i),
        )

    def moe(self, at: str) -> MoeWeights:
        c = self.config
        h, e, i, shared = c.hidden_size, c.num_experts, c.expert_size, c.shared_expert_size
        stacked = e + (shared == i)
        gate_up = torch.empty(stacked, 2 * i, h, device=self.device, dtype=self.dtype)
        down = torch.empty(stacked, h, i, device=self.device, dtype=self.dtype)
        experts = f"{at}mlp.experts."
        if self.per_expert(experts):
            for n in range(e):
                gate_up[n, :i] = self.matrix(f"{experts}{n}.gate_proj.weight", i, h)
                gate_up[n, i:] = self.matrix(f"{experts}{n}.up_proj.weight", i, h)
                down[n] = self.matrix(f"{experts}{n}.down_proj.weight", h, i)
        else:
            gate_up[:e] = self.matrix(f"{experts}gate_up_proj", e, 2 * i, h)
            down[:e] = self.matrix(f"{experts}down_proj", e, h, i)
        names = ("gate", "up")
        at_ = f"{at}mlp.shared_expert."
        shared_up = torch.cat([self.matrix(f"{at_}{n}_proj.weight", shared, h) for n in names])
        shared_down = self.matrix(f"{at_}down_proj.weight", h, shared)
        if stacked > e:
            gate_up[e], down[e] = shared_up, shared_down
        router = self.matrix(f"{at}mlp.gate.weight", e, h)
        shared_gate = self.matrix(f"{at}mlp.shared_expert_gate.weight", 1, h)
        return MoeWeights(
            config=c,
            norm=self.gain(f"{at}post_attention_layernorm.weight", h),
            router=torch.cat((router, shared_gate)),
            gate_up=gate_up,
            down=down,
            shared_gate_up=None if stacked > e else shared_up,
            shared_down=None if stacked > e else shared_down,
        )

    def layer(self, at: str, kind: str) -> LayerWeights:
        mixer = self.gdn(at) if kind == "gdn" else self.attention(at)
        ffn = self.moe(at) if self.config.is_moe else self.mlp(at)
        return LayerWeights(mixer, ffn)

    def mtp(self) -> MtpWeights:
        h = self.config.hidden_size
        return MtpWeights(
            norm_embedding=self.gain("mtp.pre_fc_norm_embedding.weight", h),
            norm_hidden=self.gain("mtp.pre_fc_norm_hidden.weight", h),
            fc=self.matrix("mtp.fc.weight", h, 2 * h),
            layer=self.layer("mtp.layers.0.", "attention"),
            norm=self.gain("mtp.norm.weight", h),
        )

    def model(self, prefix: str, mtp: bool) -> ModelWeights:
        """All weights, with or without the MTP module."""
        c = self.config
        embed = self.matrix(f"{prefix}embed_tokens.weight", c.vocab_size, c.hidden_size)
        layers = [self.layer(f"{prefix}layers.{i}.", kind) for i, kind in enumerate(c.layer_types)]
        norm = self.gain(f"{prefix}norm.weight", c.hidden_size)
        head = embed if c.tied else self.matrix("lm_head.weight", c.vocab_size, c.hidden_size)
        return ModelWeights(
            config=c,
            embed=embed,
            layers=layers,
            head=HeadWeights(c, norm, head),
            mtp=self.mtp() if mtp else None,
            cos=self.cos,
            sin=self.sin,
        )


def rotary_tables(
    config: ModelConfig, positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin ``[positions, rotary_dim/2]`` fp32 (angles in fp32)."""
    index = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float()
    frequency = 1.0 / (config.rope_theta ** (index / config.rotary_dim))
    angles = torch.arange(positions).float()[:, None] * frequency[None]
    return angles.cos().to(device), angles.sin().to(device)
