"""Drafts from the model's multi-token prediction layer, on a CPU.

One row at a time with the fewest torch calls: a draft's value never changes which tokens come out,
so nothing here needs the exact path's padding. The layer's cache entry p holds (hidden state of
position p, token p+1). Entries for drafted positions are overwritten once the true ones are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vkengine.models.layout import AttentionWeights, MlpWeights, ModelWeights, MoeWeights
from vkengine.ops.attention.cpu import pair_order, rotation_table
from vkengine.ops.linear import PackedMatrix, pack
from vkengine.ops.moe.reference import shared_matrices
from vkengine.ops.norm.cpu import inverse_norm
from vkengine.sampler import Sampler
from vkengine.state import AttentionState

#: Largest embedding (elements) whose way through the input projection is computed beforehand.
MAX_TABLE = 1 << 24


@dataclass(slots=True)
class _Attention:
    heads: int
    kv_heads: int
    dim: int
    eps: float
    eps_head: float
    gain_in: Tensor  # [H]
    w_in: PackedMatrix  # rows k | q (re-ordered) | v | gate
    sizes: list[int]
    gains: Tensor  # [nkv + nh, D]
    w_o: Tensor  # [nh*D, H]
    turns: Tensor  # [positions, 1, D/2] complex64


class MtpDrafter:
    """Ingests accepted positions and proposes chains of tokens for one slot at a time."""

    def __init__(self, weights: ModelWeights, state: AttentionState) -> None:
        assert weights.mtp is not None
        self.config = c = weights.config
        self.state = state
        self.embed = weights.embed
        self.eps = c.hidden_size * c.rms_eps
        mtp = weights.mtp
        root = c.hidden_size**0.5
        assert isinstance(mtp.fc, Tensor)
        gains = torch.cat((mtp.norm_embedding, mtp.norm_hidden)) * root
        fc = (mtp.fc.float() * gains).t().contiguous()
        self.fc_embedding, self.fc_hidden = fc[: c.hidden_size], fc[c.hidden_size :]
        self.entry: Tensor | None = None
        if weights.embed.numel() <= MAX_TABLE:
            self.entry = self._from_tokens(weights.embed)
        self.gain = mtp.norm * root
        self.attention = _pack_attention(weights)
        self.ffn = mtp.layer.ffn
        self.ffn_gain = self.ffn.norm * root
        if isinstance(self.ffn, MlpWeights):
            assert isinstance(self.ffn.gate_up, Tensor) and isinstance(self.ffn.down, Tensor)
            self.up = (self.ffn.gate_up.float() * self.ffn_gain).t().contiguous()
            self.down = self.ffn.down.float().t().contiguous()
        else:
            self._pack_experts(self.ffn)
        head = weights.head.weight
        assert isinstance(head, Tensor) and head.numel()
        self.head = head
        self._heads: dict[int, PackedMatrix] = {}
        self._slots: dict[int, tuple[Tensor, Tensor]] = {}

    def _pack_experts(self, w: MoeWeights) -> None:
        shared = shared_matrices(w)
        e = self.config.num_experts
        stacks = [*zip(w.gate_up[:e].unbind(), w.down[:e].unbind(), strict=True), shared]
        self.experts = [
            ((up.float() * self.ffn_gain).t().contiguous(), down.float().t().contiguous())
            for up, down in stacks
        ]
        # Router and shared expert see every row: one product.
        both = torch.cat((w.router.float() * self.ffn_gain, shared[0].float() * self.ffn_gain))
        self.router = both.t().contiguous()

    def _from_tokens(self, embedding: Tensor) -> Tensor:
        """The tokens' share of the layer input: fc's embedding half of normed rows [n, H]."""
        e = embedding.float()
        return torch.mm(e * inverse_norm(e, self.eps), self.fc_embedding)

    def _enter(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """hidden [n, H] at positions p.., tokens [n] at p+1.. -> layer input [n, H]."""
        if self.entry is not None:
            share = F.embedding(tokens, self.entry)
        else:
            share = self._from_tokens(F.embedding(tokens, self.embed))
        return torch.addmm(share, hidden * inverse_norm(hidden, self.eps), self.fc_hidden)

    def _cache(self, x: Tensor, slot: int, pos: int) -> tuple[Tensor, Tensor]:
        """Append keys and values of rows x [n, H] at pos..; returns queries [n, nh, D] and gates
        [n, nh*D].
        """
        a = self.attention
        n = x.shape[0]
        y = a.w_in.apply((x * inverse_norm(x, a.eps)).mul_(a.gain_in))
        qk, v, gate = y.split_with_sizes(a.sizes, 1)
        qk = qk.view(n, a.kv_heads + a.heads, a.dim)
        qk = (qk * inverse_norm(qk, a.eps_head)).mul_(a.gains)
        torch.view_as_complex(qk.view(n, a.kv_heads + a.heads, a.dim // 2, 2)).mul_(
            a.turns[pos : pos + n]
        )
        k, q = qk.split_with_sizes((a.kv_heads, a.heads), 1)
        keys, values = self._slot(slot)
        keys[pos : pos + n].copy_(k)
        values[pos : pos + n].copy_(v.view(n, a.kv_heads, a.dim))
        return q, gate

    def _slot(self, slot: int) -> tuple[Tensor, Tensor]:
        found = self._slots.get(slot)
        if found is None:
            found = self._slots[slot] = (self.state.k[slot], self.state.v[slot])
        return found

    def _attend(self, x: Tensor, q: Tensor, gate: Tensor, slot: int, pos: int) -> Tensor:
        """x [1, H] plus the attention output of the row at pos; q [1, nh, D], gate [1, nh*D]."""
        a = self.attention
        keys, values = self._slot(slot)
        rows = q.reshape(a.kv_heads, a.heads // a.kv_heads, a.dim)
        scores = torch.bmm(rows, keys[: pos + 1].permute(1, 2, 0))
        out = torch.bmm(torch.softmax(scores, dim=-1), values[: pos + 1].transpose(0, 1))
        return torch.addmm(x, out.view(1, -1) * torch.sigmoid(gate), a.w_o)

    def _feed_forward(self, x: Tensor) -> Tensor:
        """x [1, H] -> x + ffn(norm(x))."""
        y = x * inverse_norm(x, self.eps)
        if isinstance(self.ffn, MlpWeights):
            return torch.addmm(x, _gated(torch.mm(y, self.up)), self.down)
        both = torch.mm(y, self.router)
        e = self.config.num_experts
        values, ids = torch.topk(both[:, :e], self.config.experts_per_token, dim=1)
        shares = torch.softmax(values, dim=1).tolist()[0]
        gate = torch.sigmoid(both[0, e]).item()
        x = torch.addmm(x, _gated(both[:, e + 1 :]), self.experts[e][1], alpha=gate)
        for index, share in zip(ids.tolist()[0], shares, strict=True):
            up, down = self.experts[index]
            x = torch.addmm(x, _gated(torch.mm(y, up)), down, alpha=share)
        return x

    def _head(self, head_rows: int | None) -> PackedMatrix:
        rows = min(head_rows or self.config.vocab_size, self.config.vocab_size)
        found = self._heads.get(rows)
        if found is None:
            found = self._heads[rows] = pack(self.head[:rows])
        return found

    def prefill(self, slot: int, start: int, hidden: Tensor, tokens: Tensor) -> None:
        """Fill the cache for positions start..: hidden [n, H] there and tokens [n] one later."""
        self._cache(self._enter(hidden, tokens), slot, start)

    def propose(
        self,
        slot: int,
        pos: int,
        hidden: Tensor,
        tokens: list[int],
        k: int,
        sampler: Sampler,
        head_rows: int | None = None,
    ) -> list[int]:
        """Draft k tokens after ``tokens``.

        ``hidden [n, H]`` holds positions pos..pos+n-1 (after the final norm) and ``tokens`` the n
        tokens at pos+1..pos+n, all accepted; ``sampler`` counts them already.
        """
        head = self._head(head_rows)
        drafts: list[int] = []
        ids = torch.tensor(tokens)
        at = pos + len(tokens) - 1  # the position whose successor's successor is drafted
        while True:
            x = self._enter(hidden, ids)
            count = x.shape[0]
            q, gate = self._cache(x, slot, at - count + 1)
            if count > 1:
                x, q, gate = x[-1:], q[-1:], gate[-1:]
            x = self._feed_forward(self._attend(x, q, gate, slot, at))
            hidden = (x * inverse_norm(x, self.eps)).mul_(self.gain)
            logits = head.apply(hidden)
            if not sampler.plain and logits.shape[1] < self.config.vocab_size:
                rest = self.config.vocab_size - logits.shape[1]
                logits = F.pad(logits, (0, rest), value=float("-inf"))
            drafts += sampler.choose(logits, at + 2, drafts, ahead=len(drafts))
            if len(drafts) == k:
                return drafts
            ids = torch.tensor(drafts[-1:])
            at += 1


def _gated(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=1)
    return F.silu(gate) * up


def _pack_attention(weights: ModelWeights) -> _Attention:
    assert weights.mtp is not None
    w = weights.mtp.layer.mixer
    assert isinstance(w, AttentionWeights)
    assert isinstance(w.w_qkv, Tensor) and isinstance(w.w_o, Tensor)
    c = weights.config
    nh, nkv, d, hidden = c.num_heads, c.num_kv_heads, c.head_dim, c.hidden_size
    order = pair_order(d, c.rotary_dim)
    q_gate, k, v = w.w_qkv.float().split([2 * nh * d, nkv * d, nkv * d])
    q_gate = q_gate.view(nh, 2, d, hidden)
    q = q_gate[:, 0][:, order].reshape(nh * d, hidden)
    gate = q_gate[:, 1].reshape(nh * d, hidden)
    k = k.view(nkv, d, hidden)[:, order].reshape(nkv * d, hidden)
    gains = torch.cat(
        ((w.k_norm[order] * d**0.5).expand(nkv, d), w.q_norm[order].expand(nh, d))
    ).contiguous()
    return _Attention(
        heads=nh,
        kv_heads=nkv,
        dim=d,
        eps=hidden * c.rms_eps,
        eps_head=d * c.rms_eps,
        gain_in=w.norm * hidden**0.5,
        w_in=pack(torch.cat((k, q, v, gate))),
        sizes=[(nkv + nh) * d, nkv * d, nh * d],
        gains=gains,
        w_o=w.w_o.float().t().contiguous(),
        turns=rotation_table(w),
    )
