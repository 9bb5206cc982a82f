"""The merged parameters of a Qwen3.5-family model, as the block-level ops take them.

Matrices are ``[out, in]`` (``linear(x, w) = x @ w.T``). On a CPU a matrix may be a
:class:`~vkengine.ops.linear.PackedMatrix` in place of a tensor. Norm gains are fp32 and hold
``1 + w``, except ``GdnWeights.gate_norm``, which holds the plain weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from vkengine.config import ModelConfig
from vkengine.ops.linear import Matrix


@dataclass(slots=True)
class GdnWeights:
    """One gated delta layer. C = conv_dim, Hk/Hv = key/value heads, dk/dv = head sizes."""

    config: ModelConfig
    norm: Tensor  # [H] f32
    w_in: Matrix  # [C + Hv*dv + 2*Hv, H], rows q | k | v | z | b | a
    conv: Tensor  # [C, 4] f32
    a_log: Tensor  # [Hv] f32
    dt_bias: Tensor  # [Hv] f32
    gate_norm: Tensor  # [dv] f32, plain weight
    w_out: Matrix  # [H, Hv*dv]
    packed: Any = None  # what the fast CPU path derived from the above


@dataclass(slots=True)
class AttentionWeights:
    """One gated attention layer. D = head_dim, nh/nkv = query and key/value heads."""

    config: ModelConfig
    norm: Tensor  # [H] f32
    w_qkv: Matrix  # [(2*nh + 2*nkv)*D, H]; per query head D rows query, D rows gate; then k; v
    q_norm: Tensor  # [D] f32
    k_norm: Tensor  # [D] f32
    w_o: Matrix  # [H, nh*D]
    cos: Tensor  # [positions, rotary_dim/2] f32, shared by all layers
    sin: Tensor  # [positions, rotary_dim/2] f32
    packed: Any = None


@dataclass(slots=True)
class MoeWeights:
    """Routed experts plus one shared expert. E experts of width I; shared width Is.

    When Is == I the shared expert is entry E of ``gate_up`` and ``down`` and the two
    ``shared_*`` fields are None; otherwise the stacks have E entries.
    """

    config: ModelConfig
    norm: Tensor  # [H] f32
    router: Tensor  # [E + 1, H]; the last row is the shared expert's gate
    gate_up: Tensor  # [E(+1), 2*I, H]
    down: Tensor  # [E(+1), H, I]
    shared_gate_up: Tensor | None = None  # [2*Is, H]
    shared_down: Tensor | None = None  # [H, Is]
    packed: Any = None


@dataclass(slots=True)
class MlpWeights:
    """Dense feed-forward of width I."""

    config: ModelConfig
    norm: Tensor  # [H] f32
    gate_up: Matrix  # [2*I, H]
    down: Matrix  # [H, I]
    packed: Any = None


@dataclass(slots=True)
class LayerWeights:
    mixer: GdnWeights | AttentionWeights
    ffn: MoeWeights | MlpWeights


@dataclass(slots=True)
class HeadWeights:
    """Final norm and output matrix. ``ids`` maps rows to vocabulary ids for a pruned head."""

    config: ModelConfig
    norm: Tensor  # [H] f32
    weight: Matrix  # [V or rows, H]
    ids: Tensor | None = None  # [rows] i64, ascending
    packed: Any = None


@dataclass(slots=True)
class MtpWeights:
    """The multi-token prediction module: fc(concat[embedding, hidden]) and one layer."""

    norm_embedding: Tensor  # [H] f32
    norm_hidden: Tensor  # [H] f32
    fc: Matrix  # [H, 2*H], embedding half first
    layer: LayerWeights  # mixer is always AttentionWeights
    norm: Tensor  # [H] f32
    packed: Any = None


@dataclass(slots=True)
class ModelWeights:
    """All parameters of one model. ``missing_mtp`` names why drafting is refused, else None."""

    config: ModelConfig
    embed: Tensor  # [V, H]
    layers: list[LayerWeights]
    head: HeadWeights
    mtp: MtpWeights | None
    cos: Tensor  # [positions, rotary_dim/2] f32
    sin: Tensor
    missing_mtp: list[str] = field(default_factory=list)
