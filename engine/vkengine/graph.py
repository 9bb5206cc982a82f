"""One decode round on a GPU: draft, verify, accept and commit, captured as one CUDA graph.

A :class:`Round` is built for ``B`` sequences and depth ``k``. Every buffer it touches exists before
capture; the host writes into :class:`Lanes` only when a sequence joins or leaves, and reads one
small pinned record per round. Within a round nothing waits for the host.

Order of a round: embed rows [last token, d1..dk] -> layers -> head -> keyed-noise argmax -> accept
and commit -> MTP over the committed rows -> first draft -> k - 1 chained drafts, which wait on the
device for the next round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from .models.layout import AttentionWeights, HeadWeights, LayerWeights, ModelWeights, MoeWeights
from .ops import triton_config
from .ops.accept.triton import accept_kernel
from .ops.attention import triton as attention_ops
from .ops.embed.triton import embed_kernel, mtp_input_kernel
from .ops.gdn import triton as gdn_ops
from .ops.head.triton import sample_kernel
from .ops.mlp import triton as mlp_ops
from .ops.moe import triton as moe_ops
from .ops.triton_launch import Prefetch, PrefetchPlan, Stream, centred, counter, gemv
from .rows import Rows, Workspace
from .sampler import ACCEPTANCE_CHOICE
from .state import AttentionState, GdnState, State

#: Columns of the token and record rows: up to 9 tokens; the record's last column is the count.
WIDTH = 16
#: Vocabulary entries per program of the sampler.
SAMPLE_CHUNK = 2048


@dataclass(slots=True)
class Lanes:
    """Device cursors of B sequences, shared by the rounds of every depth."""

    tokens: Tensor  # [B, 16] i32: last committed token, then drafts
    record: Tensor  # [B, 16] i32: committed tokens of the round (-1 beyond), count last
    slot: Tensor  # [B] i32
    pos: Tensor  # [B] i32: first row of the round in flight
    next_pos: Tensor  # [B] i32: first row of the next round
    limit: Tensor  # [B] i32: drafts that exist
    temperature: Tensor  # [B] f32
    acceptance: Tensor  # [B] f32: synthetic chance, negative compares
    seed: Tensor  # [B, 3] i32: low, high, choice
    row: Tensor  # [B] i32: the row the first draft is drawn from
    chain_pos: Tensor  # [16, B] i32
    host: Tensor  # [B, 16] i32, pinned

    @staticmethod
    def make(batch: int, null_slot: int, device: torch.device) -> Lanes:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return Lanes(
            tokens=ints(batch, WIDTH),
            record=ints(batch, WIDTH),
            slot=torch.full((batch,), null_slot, dtype=torch.int32, device=device),
            pos=ints(batch),
            next_pos=ints(batch),
            limit=ints(batch),
            temperature=torch.zeros(batch, device=device),
            acceptance=torch.full((batch,), -1.0, device=device),
            seed=ints(batch, 3),
            row=ints(batch),
            chain_pos=ints(WIDTH, batch),
            host=torch.zeros(
                (batch, WIDTH),
                dtype=torch.int32,
                pin_memory=device.type == "cuda",
                device="meta" if device.type == "meta" else "cpu",
            ),
        )

    def join(
        self,
        lane: int,
        slot: int,
        token: int,
        pos: int,
        *,
        seed: int = 0,
        choice: int = 0,
        temperature: float = 0.0,
        acceptance: float | None = None,
    ) -> None:
        """Start a sequence whose tokens before ``pos`` are in the state; ``token`` is at pos."""

        def i32(word: int) -> int:
            word &= 0xFFFFFFFF
            return word - (1 << 32) if word >> 31 else word

        self.tokens[lane] = 0
        self.tokens[lane, 0] = token
        self.slot[lane] = slot
        self.next_pos[lane] = pos
        self.limit[lane] = 0
        self.temperature[lane] = temperature
        self.acceptance[lane] = -1.0 if acceptance is None else acceptance
        words = [i32(seed), i32(seed >> 32), i32(choice)]
        self.seed[lane] = torch.tensor(words, dtype=torch.int32, device=self.seed.device)

    def leave(self, lane: int, null_slot: int) -> None:
        """Point the lane at the null slot."""
        self.join(lane, null_slot, 0, 0)


@dataclass(slots=True)
class Round:
    """One round for all lanes at depth ``k``; ``run`` launches it, ``capture`` makes a graph."""

    weights: ModelWeights
    state: State
    lanes: Lanes
    ws: Workspace
    k: int
    head_rows: int | None = 32768
    plan: PrefetchPlan = field(default_factory=PrefetchPlan)
    graph: torch.cuda.CUDAGraph | None = None
    on_moe: Callable[[int, Tensor], None] | None = None

    def __post_init__(self) -> None:
        if self.k and self.weights.mtp is None:
            raise ValueError("draft.method: the model has no MTP module")

    @property
    def batch(self) -> int:
        return self.lanes.slot.shape[0]

    def stream(self, name: str, rows: int) -> Stream:
        hidden = self.weights.config.hidden_size
        dtype = self.weights.embed.dtype
        return Stream(
            self.ws.get(name + ".h", (rows, hidden)), self.ws.get(name + ".hx", (rows, hidden), dtype)
        )

    def run(self) -> None:
        """Launch every kernel of the round on the current stream."""
        w, lanes, m = self.weights, self.lanes, self.k + 1
        c = w.config
        rows = self.batch * m
        stream = self.stream("trunk", rows)
        hp = triton.next_power_of_2(c.hidden_size)
        pdl = triton_config.PDL
        embed_kernel[(rows,)](
            lanes.tokens,
            w.embed,
            stream.h,
            stream.hx,
            lanes.pos,
            lanes.next_pos,
            WIDTH,
            c.vocab_size,
            M=m,
            H=c.hidden_size,
            HP=hp,
            PDL=pdl,
            launch_pdl=pdl,
        )
        at = self.rows(lanes.pos, m)
        for i, layer in enumerate(w.layers):
            after = w.layers[i + 1] if i + 1 < len(w.layers) else None
            following = first_weight(after) if after else tensor(w.head.weight)
            self.layer(stream, layer, self.state.layers[i], at, following, i)
        y = self.ws.get("y", (self.batch, m), torch.int32)
        self.draw("verify", stream.hx, w.head, None, y, m, lanes.pos, 1, None)
        accept_kernel[(self.batch,)](
            lanes.tokens,
            y,
            lanes.limit,
            lanes.acceptance,
            lanes.seed,
            lanes.slot,
            lanes.pos,
            lanes.next_pos,
            self.state.folded,
            lanes.row,
            lanes.chain_pos,
            lanes.record,
            WIDTH,
            self.batch,
            WIDTH,
            M=m,
            MP=16,
            SALT=ACCEPTANCE_CHOICE,
            num_warps=1,
            PDL=pdl,
            launch_pdl=pdl,
        )
        if self.k:
            self.drafts(stream, m)
        lanes.host.copy_(lanes.record, non_blocking=True)

    def rows(self, pos: Tensor, m: int) -> Rows:
        valid = self.ws.get("valid", (self.batch * m,), torch.bool)
        return Rows(self.lanes.slot, pos, m, valid)

    def layer(
        self,
        stream: Stream,
        layer: LayerWeights,
        state: GdnState | AttentionState | None,
        rows: Rows,
        following: Tensor | None,
        index: int,
    ) -> None:
        plan, ffn, mixer = self.plan, layer.ffn, layer.mixer
        moe = isinstance(ffn, MoeWeights)
        ahead = Prefetch.of(ffn.router if moe else tensor(ffn.gate_up), plan.router)
        behind = Prefetch.of(following, plan.mixer)
        if isinstance(mixer, AttentionWeights):
            assert isinstance(state, AttentionState)
            attention_ops.run(stream, mixer, state, rows, self.ws, pf_out=plan.out, pf=ahead)
        else:
            assert isinstance(state, GdnState)
            gdn_ops.run(stream, mixer, state, rows, self.ws, pf_out=plan.out, pf=ahead)
        if moe:
            moe_ops.run(stream, ffn, self.ws, pf=behind, down_share=plan.down)
            if self.on_moe is not None:
                r = min(8, stream.h.shape[0])
                ids = self.ws.get("moe.ids", (r, ffn.config.experts_per_token), torch.int32)
                self.on_moe(index, ids)
        else:
            mlp_ops.run(stream, ffn, self.ws, pf=behind)

    def draw(
        self,
        name: str,
        x: Tensor,
        head: HeadWeights,
        row: Tensor | None,
        out: Tensor,
        m: int,
        pos: Tensor,
        add: int,
        ahead: Prefetch | None,
    ) -> None:
        """Logits of the rows ``x`` and the keyed-noise argmax into ``out [B, >= m]``."""
        weight = tensor(head.weight)
        v = weight.shape[0]
        logits = self.ws.get("logits." + name, (x.shape[0], v))
        gain = centred(self.ws, head.norm, weight.dtype)
        gemv(weight, x, logits, eps=head.config.rms_eps, gain=gain, pf=ahead)
        parts = triton.cdiv(v, SAMPLE_CHUNK)
        pdl = triton_config.PDL
        rows = self.batch * m
        ids = None
        if head.ids is not None:
            ids = self.ws.buffers.get(("ids", head.ids.data_ptr()))
            if ids is None:
                ids = head.ids.to(torch.int32)
                self.ws.buffers[("ids", head.ids.data_ptr())] = ids
        sample_kernel[(parts, rows)](
            logits,
            ids if ids is not None else lanes_dummy(self.lanes),
            row if row is not None else self.lanes.row,
            self.lanes.temperature,
            self.lanes.seed,
            pos,
            self.ws.get("sample.value", (rows, parts)),
            self.ws.get("sample.index", (rows, parts), torch.int32),
            counter(self.ws, "sample", rows),
            out,
            v,
            add,
            out.stride(0),
            M=m,
            HAS_IDS=ids is not None,
            HAS_ROW=row is not None,
            CHUNK=SAMPLE_CHUNK,
            PARTS=parts,
            PP=triton.next_power_of_2(parts),
            PDL=pdl,
            launch_pdl=pdl,
        )

    def drafts(self, trunk: Stream, m: int) -> None:
        """MTP over the committed rows, then k tokens into ``tokens[:, 1:]``."""
        w, lanes, batch = self.weights, self.lanes, self.batch
        mtp = w.mtp
        assert mtp is not None
        head = draft_head(w.head, mtp.norm, self.head_rows)
        self.mtp_step(
            trunk.h, None, lanes.record, w.head.norm, m, self.rows(lanes.pos, m), "ingest"
        )
        stream = self.stream("ingest", batch * m)
        # One row a sequence matters; the others ride along in the same weight pass.
        self.draw("draft", stream.hx, head, lanes.row, lanes.tokens[:, 1:], 1, lanes.next_pos, 1, None)
        for i in range(1, self.k):
            source, row = (stream.h, lanes.row if i == 1 else None)
            at = self.rows(lanes.chain_pos[i], 1)
            self.mtp_step(source, row, lanes.tokens[:, i:], mtp.norm, 1, at, "chain")
            stream = self.stream("chain", batch)
            out = lanes.tokens[:, i + 1 :]
            self.draw("chain", stream.hx, head, None, out, 1, lanes.next_pos, i + 1, None)

    def mtp_step(
        self,
        h: Tensor,
        row: Tensor | None,
        tokens: Tensor,
        final: Tensor,
        m: int,
        rows: Rows,
        name: str,
    ) -> None:
        w = self.weights
        c, mtp = w.config, w.mtp
        assert mtp is not None
        count = self.batch * m
        dtype = w.embed.dtype
        pdl = triton_config.PDL
        x = self.ws.get("mtp.x", (count, 2 * c.hidden_size), dtype)
        mtp_input_kernel[(count,)](
            tokens,
            w.embed,
            h,
            row if row is not None else self.lanes.row,
            centred(self.ws, final, dtype),
            centred(self.ws, mtp.norm_embedding, dtype),
            centred(self.ws, mtp.norm_hidden, dtype),
            x,
            WIDTH,
            c.vocab_size,
            c.rms_eps,
            M=m,
            H=c.hidden_size,
            HP=triton.next_power_of_2(c.hidden_size),
            HAS_ROW=row is not None,
            PDL=pdl,
            launch_pdl=pdl,
        )
        stream = self.stream(name, count)
        fc = tensor(mtp.fc)
        gemv(fc, x, None, stream=stream, add=False)
        self.layer(stream, mtp.layer, self.state.mtp, rows, None, len(w.layers))

    def capture(self) -> None:
        """Warm up on the lanes as they are (state of live lanes is put back by the caller), then
        record the round. Allocates nothing afterwards."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def replay(self) -> None:
        assert self.graph is not None
        self.graph.replay()


def tensor(w: object) -> Tensor:
    """A GPU matrix is a plain tensor."""
    assert isinstance(w, Tensor)
    return w


def first_weight(layer: LayerWeights) -> Tensor:
    mixer = layer.mixer
    return tensor(mixer.w_qkv if isinstance(mixer, AttentionWeights) else mixer.w_in)


def lanes_dummy(lanes: Lanes) -> Tensor:
    return lanes.row


def draft_head(head: HeadWeights, norm: Tensor, rows: int | None) -> HeadWeights:
    """The head under the MTP layer's norm, cut to the first ``rows`` ids when it has no map."""
    weight = tensor(head.weight)
    if rows is not None and rows < weight.shape[0] and head.ids is None:
        weight = weight[:rows]
    return HeadWeights(head.config, norm, weight, head.ids)
