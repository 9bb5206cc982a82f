"""The memory of running sequences, keyed by absolute position.

Nothing is ever copied to roll back: a sequence whose last rows were rejected simply continues at
a smaller position, and later rows overwrite what the rejected ones left.

* Attention: row at position p of a slot writes index p of ``k`` and ``v``.
* Convolution: the pre-convolution q|k|v row of position p sits at index ``p & 15`` of ``conv``.
* Recurrence: ``S`` holds every token < ``folded[slot]``; tokens folded..pos-1 are pending in
  ``ring_k`` (normalised key), ``ring_u`` (update vector) and ``ring_g`` (decay factor) at index
  ``p & 15``. Live rows never write ``S``; the next round folds what was accepted.

Slot ``max_sequences`` is the null slot, which padded rows use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .config import ModelConfig

RING = 16
RING_MASK = RING - 1
#: Positions beyond max_len that rejected or padded rows may write.
PAD = 16


@dataclass(slots=True)
class GdnState:
    """One gated delta layer's state for all slots (S+1 with the null slot)."""

    conv: Tensor  # [S+1, 16, C] f32
    S: Tensor  # [S+1, Hv, dk, dv] f32
    ring_k: Tensor  # [S+1, 16, Hk, dk] f32
    ring_u: Tensor  # [S+1, 16, Hv, dv] f32
    ring_g: Tensor  # [S+1, 16, Hv] f32
    folded: Tensor  # [S+1] i32, shared by all layers; the step moves it after the last layer
    views: dict[int, Any] = field(default_factory=dict)  # what the CPU path made of a slot


@dataclass(slots=True)
class AttentionState:
    """One attention layer's keys (rotated) and values for all slots."""

    k: Tensor  # [S+1, cache_length(max_len), nkv, D]
    v: Tensor  # [S+1, cache_length(max_len), nkv, D]


def cache_length(max_len: int) -> int:
    """Cache entries per slot: max_len and padding, up to whole splits of 256."""
    return -(-(max_len + PAD) // 256) * 256


def bytes_per_sequence(config: ModelConfig, max_len: int, dtype: torch.dtype) -> int:
    """Bytes one sequence's slot takes, drafts included (the rings hold them)."""
    item = torch.empty(0, dtype=dtype).element_size()
    layers = config.attention_layers + (1 if config.mtp_layers else 0)
    cache = 2 * layers * cache_length(max_len) * config.num_kv_heads * config.head_dim * item
    ring = config.conv_dim + config.key_size + config.value_size + config.gdn_value_heads
    recurrent = config.gdn_value_heads * config.gdn_key_dim * config.gdn_value_dim
    return cache + config.gdn_layers * (RING * ring + recurrent) * 4


class State:
    """All layers' state for ``max_sequences`` slots and the null slot."""

    def __init__(
        self,
        config: ModelConfig,
        max_sequences: int,
        max_len: int,
        device: torch.device,
        dtype: torch.dtype,
        mtp: bool,
    ) -> None:
        slots = max_sequences + 1
        self.config = config
        self.max_sequences = max_sequences
        self.max_len = max_len
        self.null_slot = max_sequences
        n_gdn, n_att = config.gdn_layers, config.attention_layers
        hv, hk = config.gdn_value_heads, config.gdn_key_heads
        dk, dv = config.gdn_key_dim, config.gdn_value_dim

        def zeros(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        cache = (slots, cache_length(max_len), config.num_kv_heads, config.head_dim)
        self.k = zeros(n_att, *cache, kind=dtype)
        self.v = zeros(n_att, *cache, kind=dtype)
        self.mtp_k = zeros(*(cache if mtp else (0,)), kind=dtype)
        self.mtp_v = zeros(*(cache if mtp else (0,)), kind=dtype)
        self.conv = zeros(n_gdn, slots, RING, config.conv_dim)
        self.S = zeros(n_gdn, slots, hv, dk, dv)
        self.ring_k = zeros(n_gdn, slots, RING, hk, dk)
        self.ring_u = zeros(n_gdn, slots, RING, hv, dv)
        self.ring_g = zeros(n_gdn, slots, RING, hv)
        self.folded = zeros(slots, kind=torch.int32)
        self.layers: list[GdnState | AttentionState] = []
        gdn = att = 0
        for kind in config.layer_types:
            if kind == "gdn":
                parts = (self.conv, self.S, self.ring_k, self.ring_u, self.ring_g)
                self.layers.append(GdnState(*(part[gdn] for part in parts), folded=self.folded))
                gdn += 1
            else:
                self.layers.append(AttentionState(self.k[att], self.v[att]))
                att += 1
        self.mtp = AttentionState(self.mtp_k, self.mtp_v) if mtp else None

    @torch.inference_mode()
    def reset(self, slot: int) -> None:
        """Make ``slot`` hold nothing: the state before position 0."""
        for part in (self.conv, self.S, self.ring_k, self.ring_u, self.ring_g):
            part[:, slot].zero_()
        self.folded[slot] = 0

    def is_finite(self, slot: int) -> bool:
        """False when any recurrent state of ``slot`` is NaN or infinite."""
        parts = (self.S, self.ring_u, self.conv)
        return all(bool(torch.isfinite(part[:, slot].sum())) for part in parts)

    def recurrent(self, slot: int, pos: int) -> Tensor:
        """S with every token < ``pos`` folded in, ``[layers, Hv, dk, dv]``; for comparisons."""
        state = self.S[:, slot].clone()
        rep = self.config.gdn_value_heads // self.config.gdn_key_heads
        for p in range(int(self.folded[slot]), pos):
            i = p & RING_MASK
            key = self.ring_k[:, slot, i].repeat_interleave(rep, dim=1)  # [layers, Hv, dk]
            update = self.ring_u[:, slot, i]
            state = state * self.ring_g[:, slot, i][..., None, None]
            state = state + key[..., :, None] * update[..., None, :]
        return state
