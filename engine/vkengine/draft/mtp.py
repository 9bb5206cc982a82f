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


@dataclass(slots=True)
class _Attention:
    heads: int
    kv_heads: int
    dim: int
    eps: float
    w_in: Tensor  # [H, columns]: k | v | q | gate
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
        self.fc = (mtp.fc.float() * gains).t().contiguous()
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

    def _enter(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """hidden [n, H] at positions p.., tokens [n] at p+1.. -> layer input [n, H]."""
        e = F.embedding(tokens, self.embed).float()
        x = torch.cat(
            (e * inverse_norm(e, self.eps), hidden * inverse_norm(hidden, self.eps)), dim=1
        )
        return torch.mm(x, self.fc)

    def _cache(self, x: Tensor, slot: int, pos: int, query: bool) -> tuple[Tensor, Tensor] | None:
        """Append keys and values of rows x [n, H] at pos..; the last row's (q, gate) on request."""
        a = self.attention
        n, d = x.shape[0], a.dim
        kv = 2 * a.kv_heads * d
        y = torch.mm(x * inverse_norm(x, a.eps), a.w_in if query else a.w_in[:, :kv])
        k = y[:, : a.kv_heads * d].view(n, a.kv_heads, d)
        k = _rotate(k, a.gains[: a.kv_heads], a.turns[pos : pos + n], d * self.config.rms_eps)
        self.state.k[slot, pos : pos + n].copy_(k)
        self.state.v[slot, pos : pos + n].copy_(y[:, a.kv_heads * d : kv].view(n, a.kv_heads, d))
        if not query:
            return None
        last = pos + n - 1
        q = y[-1:, kv : kv + a.heads * d].view(1, a.heads, d)
        q = _rotate(q, a.gains[a.kv_heads :], a.turns[last : last + 1], d * self.config.rms_eps)
        return q, y[-1:, kv + a.heads * d :]

    def _attend(self, q: Tensor, gate: Tensor, slot: int, pos: int) -> Tensor:
        a = self.attention
        rows = q.view(a.kv_heads, a.heads // a.kv_heads, a.dim)
        scores = torch.bmm(rows, self.state.k[slot, : pos + 1].permute(1, 2, 0))
        cells = self.state.v[slot, : pos + 1].transpose(0, 1)
        out = torch.bmm(torch.softmax(scores, dim=-1), cells)
        return torch.mm(out.view(1, -1) * torch.sigmoid(gate), a.w_o)

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
        self._cache(self._enter(hidden, tokens), slot, start, query=False)

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
            entry = self._cache(x, slot, at - x.shape[0] + 1, query=True)
            assert entry is not None
            x = x[-1:] + self._attend(*entry, slot, at)
            x = self._feed_forward(x)
            hidden = x * inverse_norm(x, self.eps) * self.gain
            logits = head.apply(hidden)
            if not sampler.plain and logits.shape[1] < self.config.vocab_size:
                rest = self.config.vocab_size - logits.shape[1]
                logits = F.pad(logits, (0, rest), value=float("-inf"))
            drafts += sampler.choose(logits, at + 2, drafts, ahead=len(drafts))
            if len(drafts) == k:
                return drafts
            ids = torch.tensor(drafts[-1:])
            at += 1


def _rotate(x: Tensor, gains: Tensor, turns: Tensor, eps: float) -> Tensor:
    """Head norm and RoPE: x [n, heads, D] in paired order."""
    x = (x * inverse_norm(x, eps)).mul_(gains)
    n, heads, d = x.shape
    torch.view_as_complex(x.view(n, heads, d // 2, 2)).mul_(turns)
    return x


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
    rows = torch.cat((k, v, q, gate)) * (w.norm * hidden**0.5)
    gains = torch.cat(
        ((w.k_norm[order] * d**0.5).expand(nkv, d), w.q_norm[order].expand(nh, d))
    ).contiguous()
    return _Attention(
        heads=nh,
        kv_heads=nkv,
        dim=d,
        eps=hidden * c.rms_eps,
        w_in=rows.t().contiguous(),
        gains=gains,
        w_o=w.w_o.float().t().contiguous(),
        turns=rotation_table(w),
    )
