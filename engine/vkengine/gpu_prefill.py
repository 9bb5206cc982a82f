"""Prompts on a GPU: chunks at absolute boundaries, leaving the state that rounds continue from.

A chunk's numbers depend on the tokens before it and in it alone, so a prompt cut at multiples of
``CHUNK`` leaves the same bits however it is cut. Rows are padded to a multiple of 128; padding rows
touch no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from .models.layout import AttentionWeights, LayerWeights, ModelWeights, MoeWeights
from .ops.attention import chunk as attention_chunk
from .ops.embed.triton import mtp_input_kernel
from .ops.gdn import chunk as gdn_chunk
from .ops.linear import linear
from .ops.moe import grouped
from .ops.rowwise import norm, swiglu
from .ops.triton_launch import centred
from .rows import Workspace
from .state import AttentionState, GdnState, State

#: Tokens per pass over the weights.
CHUNK = 4096
#: Rows are padded to a multiple of this: whole tiles of every kernel.
ROWS = 128


@dataclass(slots=True)
class Prefill:
    """``prompt`` puts tokens into a slot: state only, no logits."""

    weights: ModelWeights
    state: State
    ws: Workspace
    chunk: int = CHUNK

    @torch.inference_mode()
    def prompt(self, slot: int, tokens: Tensor, start: int, end: int) -> None:
        """Put ``tokens[start:end]`` (on the device) into ``slot``, which holds exactly those
        before ``start``, a multiple of ``chunk``. ``tokens[end]`` is the true next token, which
        the MTP module's row ``end - 1`` takes in."""
        if start % self.chunk:
            raise ValueError(f"start {start} is no multiple of {self.chunk}")
        for first in range(start, end, self.chunk):
            self._chunk(slot, tokens, first, min(first + self.chunk, end))

    def warm(self) -> None:
        """Compile everything, on the null slot."""
        slot, most = self.state.null_slot, min(self.chunk, self.state.max_len - 1)
        for count in sorted({min(n, most) for n in (ROWS, 1024, self.chunk)}):
            tokens = torch.zeros(count + 1, dtype=torch.int32, device=self.ws.device)
            self.prompt(slot, tokens, 0, count)
        self.state.reset(slot)

    def _chunk(self, slot: int, tokens: Tensor, start: int, end: int) -> None:
        w, count = self.weights, end - start
        rows = -(-count // ROWS) * ROWS
        own = tokens[start : end + 1]
        h = F.embedding(F.pad(own[:count], (0, rows - count)), w.embed).float()
        for layer, state in zip(w.layers, self.state.layers, strict=True):
            self._mixer(h, layer, state, slot, start, count)
            self._feed_forward(h, layer, count)
        self.state.folded[slot] = end
        if w.mtp is not None and self.state.mtp is not None:
            self._ingest(h, own[1:].contiguous(), slot, start, count)

    def _mixer(
        self, h: Tensor, layer: LayerWeights, state: GdnState | AttentionState,
        slot: int, start: int, count: int,
    ) -> None:  # fmt: skip
        w = layer.mixer
        if isinstance(w, AttentionWeights):
            assert isinstance(state, AttentionState)
            y = linear(norm(h, w.norm, w.config.rms_eps, _dtype(w.w_qkv)), w.w_qkv)
            x = attention_chunk.mix(y, w, state, slot, start, count)
            h += linear(x, w.w_o)
        else:
            assert isinstance(state, GdnState)
            y = linear(norm(h, w.norm, w.config.rms_eps, _dtype(w.w_in)), w.w_in)
            x = gdn_chunk.mix(y, w, state, slot, start, count, self.ws)
            h += linear(x, w.w_out)

    def _feed_forward(self, h: Tensor, layer: LayerWeights, count: int) -> None:
        w = layer.ffn
        if isinstance(w, MoeWeights):
            grouped.moe(h, w, count)
            return
        dtype = _dtype(w.gate_up)
        y = linear(norm(h, w.norm, w.config.rms_eps, dtype), w.gate_up)
        h += linear(swiglu(y, dtype), w.down)

    def _ingest(self, h: Tensor, after: Tensor, slot: int, start: int, count: int) -> None:
        """The MTP layer's cache: hidden state of position p with the token at p + 1."""
        w, mtp, cache = self.weights, self.weights.mtp, self.state.mtp
        assert mtp is not None and cache is not None
        c, dtype = w.config, w.embed.dtype
        x = torch.zeros(h.shape[0], 2 * c.hidden_size, device=h.device, dtype=dtype)
        mtp_input_kernel[(count,)](
            after, w.embed, h, after, centred(self.ws, w.head.norm, dtype),
            centred(self.ws, mtp.norm_embedding, dtype), centred(self.ws, mtp.norm_hidden, dtype),
            x, 1, c.vocab_size, c.rms_eps, M=1, H=c.hidden_size,
            HP=triton.next_power_of_2(c.hidden_size), HAS_ROW=False, PDL=False,
        )  # fmt: skip
        mixer = mtp.layer.mixer
        assert isinstance(mixer, AttentionWeights)
        inner = norm(linear(x, mtp.fc), mixer.norm, c.rms_eps, dtype)
        attention_chunk.remember(linear(inner, mixer.w_qkv), mixer, cache, slot, start, count)


def _dtype(w: object) -> torch.dtype:
    assert isinstance(w, Tensor)
    return w.dtype
