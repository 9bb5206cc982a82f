"""Small odd shapes and random weights for the block kernels, on any device and dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from vkengine.config import ModelConfig
from vkengine.models.layout import AttentionWeights, GdnWeights, MlpWeights, MoeWeights
from vkengine.state import State


def small_config(**changes: object) -> ModelConfig:
    """3 value heads per key head, 10 experts top-3, nothing a power of two that need not be."""
    values: dict[str, object] = {
        "name": "small",
        "hidden_size": 48,
        "num_layers": 2,
        "layer_types": ("gdn", "attention"),
        "vocab_size": 300,
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_dim": 32,
        "rotary_dim": 8,
        "rope_theta": 1e4,
        "gdn_key_heads": 1,
        "gdn_value_heads": 3,
        "gdn_key_dim": 16,
        "gdn_value_dim": 16,
        "conv_width": 4,
        "intermediate_size": 56,
        "num_experts": 10,
        "experts_per_token": 3,
        "expert_size": 24,
        "shared_expert_size": 24,
        "rms_eps": 1e-6,
        "tied": False,
        "max_positions": 256,
        "mtp_layers": 1,
        "eos_token_ids": (0,),
    }
    values.update(changes)
    return ModelConfig(**values)  # type: ignore[arg-type]


class Make:
    """Random tensors of one device, dtype and seed."""

    def __init__(self, config: ModelConfig, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.c = config
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self.generator, device=self.device) * std
        return x.to(dtype or torch.float32)

    def matrix(self, *shape: int) -> Tensor:
        return self.normal(*shape, std=shape[-1] ** -0.5, dtype=self.dtype)

    def gain(self, n: int, plus: float = 1.0) -> Tensor:
        # A checkpoint's gains are values of the weights' type.
        return self.normal(n, std=0.1).to(self.dtype).float() + plus

    def gdn(self) -> GdnWeights:
        c = self.c
        hv = c.gdn_value_heads
        return GdnWeights(
            config=c,
            norm=self.gain(c.hidden_size),
            w_in=self.matrix(c.conv_dim + c.value_size + 2 * hv, c.hidden_size),
            conv=self.normal(c.conv_dim, 4, std=0.5),
            a_log=self.normal(hv),
            dt_bias=self.normal(hv),
            gate_norm=self.gain(c.gdn_value_dim),
            w_out=self.matrix(c.hidden_size, c.value_size),
        )

    def rope(self) -> tuple[Tensor, Tensor]:
        c = self.c
        half = c.rotary_dim // 2
        inverse = c.rope_theta ** (-torch.arange(half, device=self.device).double() / half)
        angle = torch.arange(c.max_positions, device=self.device).double()[:, None] * inverse
        return angle.cos().float(), angle.sin().float()

    def attention(self) -> AttentionWeights:
        c = self.c
        cos, sin = self.rope()
        nh, nkv, d = c.num_heads, c.num_kv_heads, c.head_dim
        return AttentionWeights(
            config=c,
            norm=self.gain(c.hidden_size),
            w_qkv=self.matrix((2 * nh + 2 * nkv) * d, c.hidden_size),
            q_norm=self.gain(d),
            k_norm=self.gain(d),
            w_o=self.matrix(c.hidden_size, nh * d),
            cos=cos,
            sin=sin,
        )

    def moe(self) -> MoeWeights:
        c = self.c
        e = c.num_experts + 1
        return MoeWeights(
            config=c,
            norm=self.gain(c.hidden_size),
            router=self.matrix(e, c.hidden_size),
            gate_up=self.matrix(e, 2 * c.expert_size, c.hidden_size),
            down=self.matrix(e, c.hidden_size, c.expert_size),
        )

    def mlp(self) -> MlpWeights:
        c = self.c
        return MlpWeights(
            config=c,
            norm=self.gain(c.hidden_size),
            gate_up=self.matrix(2 * c.intermediate_size, c.hidden_size),
            down=self.matrix(c.hidden_size, c.intermediate_size),
        )

    def state(self, slots: int = 2, max_len: int = 100) -> State:
        return State(self.c, slots, max_len, torch.device(self.device), self.dtype, True)


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    """Relative error in the 2-norm; NaN never passes."""
    a, b = a.double(), b.double()
    error = float((a - b).norm() / b.norm())
    assert error < tolerance, f"relative error {error:.2e}"
