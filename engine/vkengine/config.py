"""Model shapes: a Hugging Face ``config.json`` (or a known big shape) as one frozen value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DENSE_TYPES = frozenset({"qwen3_5", "qwen3_5_text"})
MOE_TYPES = frozenset({"qwen3_5_moe", "qwen3_5_moe_text"})


class ConfigError(ValueError):
    """The configuration is missing, unreadable or of an architecture VK does not serve."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one Qwen3.5-family text model. Counts are elements, epsilons are absolute."""

    name: str
    hidden_size: int
    num_layers: int
    layer_types: tuple[str, ...]  # "gdn" | "attention"
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    conv_width: int
    intermediate_size: int  # dense feed-forward width; 0 for MoE
    num_experts: int  # 0 for dense
    experts_per_token: int
    expert_size: int
    shared_expert_size: int
    rms_eps: float
    tied: bool
    max_positions: int
    mtp_layers: int
    eos_token_ids: tuple[int, ...]
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if len(self.layer_types) != self.num_layers:
            raise ConfigError(
                f"config: layer_types has {len(self.layer_types)} entries, "
                f"num_hidden_layers is {self.num_layers}"
            )
        if self.num_heads % self.num_kv_heads or self.gdn_value_heads % self.gdn_key_heads:
            raise ConfigError("config: query (value) heads must be a multiple of key heads")
        if self.conv_width != 4:
            raise ConfigError(f"config: linear_conv_kernel_dim must be 4, not {self.conv_width}")

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def key_size(self) -> int:
        """Width of all GDN keys together."""
        return self.gdn_key_heads * self.gdn_key_dim

    @property
    def value_size(self) -> int:
        """Width of all GDN values together."""
        return self.gdn_value_heads * self.gdn_value_dim

    @property
    def conv_dim(self) -> int:
        """Width of the convolved q | k | v row."""
        return 2 * self.key_size + self.value_size

    @property
    def gdn_layers(self) -> int:
        return sum(kind == "gdn" for kind in self.layer_types)

    @property
    def attention_layers(self) -> int:
        return self.num_layers - self.gdn_layers


def _layer_types(text: Mapping[str, Any], count: int) -> tuple[str, ...]:
    given = text.get("layer_types")
    if given is not None:
        names = {"linear_attention": "gdn", "full_attention": "attention"}
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ConfigError(f"config: unknown layer_types {unknown}")
        return tuple(names[kind] for kind in given)
    every = int(text.get("full_attention_interval", 4))
    return tuple("attention" if (i + 1) % every == 0 else "gdn" for i in range(count))


def _eos(raw: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    value = text.get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def parse_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """Read a decoded ``config.json``, with settings under ``text_config`` or at the top.

    Raises ConfigError when the architecture is not Qwen3.5 or a field is missing.
    """
    text: Mapping[str, Any] = raw.get("text_config") or raw
    kind = text.get("model_type", raw.get("model_type"))
    if kind not in DENSE_TYPES | MOE_TYPES:
        raise ConfigError(
            f"config: model_type {kind!r} is not served (known: {sorted(DENSE_TYPES | MOE_TYPES)})"
        )
    if text.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config: hidden_act {text['hidden_act']!r} is not served")
    if text.get("attention_bias", False):
        raise ConfigError("config: attention_bias is not served")
    if not text.get("attn_output_gate", True):
        raise ConfigError("config: attn_output_gate false is not served")
    if text.get("output_gate_type", "swish") not in ("swish", "silu"):
        raise ConfigError(f"config: output_gate_type {text['output_gate_type']!r} is not served")
    moe = kind in MOE_TYPES
    rope: Mapping[str, Any] = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("rope_type", "default") not in ("default", None):
        raise ConfigError(f"config: rope_type {rope['rope_type']!r} is not served")
    dtype = text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or "bfloat16"
    partial = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    try:
        count = int(text["num_hidden_layers"])
        head_dim = int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])
        return ModelConfig(
            name=name,
            hidden_size=int(text["hidden_size"]),
            num_layers=count,
            layer_types=_layer_types(text, count),
            vocab_size=int(text["vocab_size"]),
            num_heads=int(text["num_attention_heads"]),
            num_kv_heads=int(text["num_key_value_heads"]),
            head_dim=head_dim,
            rotary_dim=int(head_dim * partial),
            rope_theta=float(rope.get("rope_theta", text.get("rope_theta", 10000.0))),
            gdn_key_heads=int(text["linear_num_key_heads"]),
            gdn_value_heads=int(text["linear_num_value_heads"]),
            gdn_key_dim=int(text["linear_key_head_dim"]),
            gdn_value_dim=int(text["linear_value_head_dim"]),
            conv_width=int(text.get("linear_conv_kernel_dim", 4)),
            intermediate_size=0 if moe else int(text["intermediate_size"]),
            num_experts=int(text["num_experts"]) if moe else 0,
            experts_per_token=int(text["num_experts_per_tok"]) if moe else 0,
            expert_size=int(text["moe_intermediate_size"]) if moe else 0,
            shared_expert_size=int(text["shared_expert_intermediate_size"]) if moe else 0,
            rms_eps=float(text.get("rms_norm_eps", 1e-6)),
            tied=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            max_positions=int(text.get("max_position_embeddings", 32768)),
            mtp_layers=int(text.get("mtp_num_hidden_layers", 0)),
            eos_token_ids=_eos(raw, text),
            dtype=str(dtype),
        )
    except KeyError as missing:
        raise ConfigError(f"config: field {missing.args[0]!r} is missing") from None


def read_config(folder: Path) -> ModelConfig:
    """Read ``folder/config.json``. Raises ConfigError naming the file."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: unreadable: {error}") from None
    try:
        return parse_config(raw, folder.resolve().name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _big(
    name: str,
    hidden: int,
    layers: int,
    heads: tuple[int, int],
    value_heads: int,
    dense: int = 0,
    experts: tuple[int, int, int] = (0, 0, 0),
    tied: bool = False,
) -> ModelConfig:
    """A published shape: ``heads`` = (query, key/value), ``experts`` = (count, top-k, width)."""
    return ModelConfig(
        name=name,
        hidden_size=hidden,
        num_layers=layers,
        layer_types=tuple("attention" if (i + 1) % 4 == 0 else "gdn" for i in range(layers)),
        vocab_size=248320,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=256,
        rotary_dim=64,
        rope_theta=1e7,
        gdn_key_heads=16,
        gdn_value_heads=value_heads,
        gdn_key_dim=128,
        gdn_value_dim=128,
        conv_width=4,
        intermediate_size=dense,
        num_experts=experts[0],
        experts_per_token=experts[1],
        expert_size=experts[2],
        shared_expert_size=experts[2],
        rms_eps=1e-6,
        tied=tied,
        max_positions=262144,
        mtp_layers=1,
        eos_token_ids=(248044,),
    )


_MOE_35B = _big("qwen35-35b-a3b", 2048, 40, (16, 2), 32, experts=(256, 8, 512))
_DENSE_27B = _big("qwen35-27b", 5120, 64, (24, 4), 48, dense=17408)
_MOE_397B = _big("qwen35-397b-a17b", 4096, 60, (32, 2), 64, experts=(512, 10, 1024))

KNOWN_SHAPES: Mapping[str, ModelConfig] = {
    shape.name: shape
    for shape in (
        _MOE_35B,
        replace(_MOE_35B, name="qwen36-35b-a3b"),
        replace(_MOE_35B, name="darwin-36b-opus"),
        _DENSE_27B,
        replace(_DENSE_27B, name="qwen36-27b"),
        _MOE_397B,
        replace(_MOE_397B, name="jgos-398b"),
        _big("qwen35-122b-a10b", 3072, 48, (32, 2), 64, experts=(256, 8, 1024)),
        _big("qwen35-9b", 4096, 32, (16, 4), 32, dense=12288),
        _big("qwen35-4b", 2560, 32, (16, 4), 32, dense=9216, tied=True),
        _big("qwen35-2b", 2048, 24, (8, 2), 16, dense=6144, tied=True),
        _big("qwen35-0.8b", 1024, 24, (8, 2), 16, dense=3584, tied=True),
    )
}
