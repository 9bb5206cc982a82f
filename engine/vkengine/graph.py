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
from dataclasses import dataclass, field, fields

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
from .ops.triton_launch import Stream, centred, counter, gemv, group_of
from .rows import Rows, Workspace
from .sampler import ACCEPTANCE_CHOICE
from .state import AttentionState, GdnState, State

#: Columns of the token and record rows: up to 9 tokens; the record's last column is the count.
WIDTH = 16
#: Vocabulary entries per program of the sampler.
SAMPLE_CHUNK = 2048
#: Prompt rows per launch: as many as a round may leave pending.
FEED = 8


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
    cap: Tensor  # [B] i32: drafts the sequence wants at most
    banned: Tensor  # [B, 4] i32: ids forbidden before ban_until, -1 for none
    ban_until: Tensor  # [B] i32: absolute position

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
            cap=torch.full((batch,), WIDTH, dtype=torch.int32, device=device),
            banned=torch.full((batch, 4), -1, dtype=torch.int32, device=device),
            ban_until=ints(batch),
        )

    def first(self, batch: int) -> Lanes:
        """The first ``batch`` lanes: views, except of what lives within a round."""
        parts = {f.name: getattr(self, f.name)[:batch] for f in fields(self)}
        parts["chain_pos"] = torch.zeros(WIDTH, batch, dtype=torch.int32, device=self.slot.device)
        return Lanes(**parts)

    def per_lane(self) -> list[Tensor]:
        """The tensors that hold a sequence between rounds, lane first."""
        own = {"row", "chain_pos", "record"}
        return [getattr(self, f.name) for f in fields(self) if f.name not in own]

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
        cap: int = WIDTH,
        banned: tuple[int, ...] = (),
        ban_until: int = 0,
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
        self.cap[lane] = cap
        self.ban_until[lane] = ban_until
        ids = (*banned, -1, -1, -1, -1)[:4]
        self.banned[lane] = torch.tensor(ids, dtype=torch.int32, device=self.seed.device)
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
    mtp: bool = True
    graphs: dict[str, torch.cuda.CUDAGraph] = field(default_factory=dict)
    on_moe: Callable[[int, Tensor], None] | None = None

    def __post_init__(self) -> None:
        if self.k and self.mtp and self.weights.mtp is None:
            raise ValueError("draft.method: the model has no MTP module")

    @property
    def batch(self) -> int:
        return self.lanes.slot.shape[0]

    def stream(self, name: str, rows: int) -> Stream:
        hidden = self.weights.config.hidden_size
        dtype = self.weights.embed.dtype
        return Stream(
            self.ws.get(name + ".h", (rows, hidden)),
            self.ws.get(name + ".hx", (rows, hidden), dtype),
            self.ws.get(name + ".squares", (rows, hidden // group_of(hidden))),
        )

    def gain(self, norm: Tensor) -> Tensor:
        return centred(self.ws, norm, self.weights.embed.dtype)

    def run(self) -> None:
        """Launch every kernel of the round on the current stream."""
        self.verify()
        self.choose()
        self.finish()

    def verify(self) -> None:
        """Embedding, layers and the head's logits for the rows of the round."""
        self.project("verify", self.layers(), self.weights.head)

    def layers(self) -> Stream:
        """Embedding and layers; moves the lanes' cursors to the round's first rows."""
        w, lanes, m = self.weights, self.lanes, self.k + 1
        c = w.config
        rows = self.batch * m
        stream = self.stream("trunk", rows)
        hp = triton.next_power_of_2(c.hidden_size)
        pdl = triton_config.PDL
        embed_kernel[(rows,)](
            lanes.tokens,
            w.embed,
            self.gain(w.layers[0].mixer.norm),
            stream.h,
            stream.hx,
            stream.squares,
            lanes.pos,
            lanes.next_pos,
            WIDTH,
            c.vocab_size,
            M=m,
            H=c.hidden_size,
            HP=hp,
            GROUP=group_of(c.hidden_size),
            PDL=pdl,
            launch_pdl=pdl,
        )
        at = self.rows(lanes.pos, m)
        for i, layer in enumerate(w.layers):
            after = w.layers[i + 1].mixer.norm if i + 1 < len(w.layers) else w.head.norm
            self.layer(stream, layer, self.state.layers[i], at, self.gain(after), i)
        return stream

    @property
    def y(self) -> Tensor:
        """The target's tokens ``[B, M]`` i32 of the round in flight."""
        return self.ws.get("y", (self.batch, self.k + 1), torch.int32)

    @property
    def logits(self) -> Tensor:
        """``[B * M, V]`` f32, the verify pass's."""
        v = tensor(self.weights.head.weight).shape[0]
        return self.ws.get("logits.verify", (self.batch * (self.k + 1), v))

    def choose(self) -> None:
        """The target's tokens by temperature and keyed noise alone."""
        self.sample(self.logits, self.weights.head, None, self.y, self.k + 1, self.lanes.pos, 1)

    def finish(self) -> None:
        """Accept, commit and draft."""
        lanes, m = self.lanes, self.k + 1
        pdl = triton_config.PDL
        accept_kernel[(self.batch,)](
            lanes.tokens,
            self.y,
            lanes.limit,
            lanes.cap,
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
            self.state.max_len,
            self.batch,
            WIDTH,
            M=m,
            MP=16,
            SALT=ACCEPTANCE_CHOICE,
            num_warps=1,
            PDL=pdl,
            launch_pdl=pdl,
        )
        if self.k and self.mtp:
            self.drafts(self.stream("trunk", self.batch * m), m)

    def rows(self, pos: Tensor, m: int) -> Rows:
        valid = self.ws.get("valid", (self.batch * m,), torch.bool)
        return Rows(self.lanes.slot, pos, m, valid)

    def layer(
        self,
        stream: Stream,
        layer: LayerWeights,
        state: GdnState | AttentionState | None,
        rows: Rows,
        after: Tensor,
        index: int,
    ) -> None:
        """Mixer and feed-forward; ``after`` is the gain of the norm that reads the stream next."""
        ffn, mixer = layer.ffn, layer.mixer
        gain = self.gain(ffn.norm)
        if isinstance(mixer, AttentionWeights):
            assert isinstance(state, AttentionState)
            attention_ops.run(stream, mixer, state, rows, self.ws, gain)
        else:
            assert isinstance(state, GdnState)
            gdn_ops.run(stream, mixer, state, rows, self.ws, gain)
        if isinstance(ffn, MoeWeights):
            moe_ops.run(stream, ffn, self.ws, after)
            if self.on_moe is not None:
                r = min(8, stream.h.shape[0])
                ids = self.ws.get("moe.ids", (r, ffn.config.experts_per_token), torch.int32)
                self.on_moe(index, ids)
        else:
            mlp_ops.run(stream, ffn, self.ws, after)

    def project(self, name: str, stream: Stream, head: HeadWeights) -> Tensor:
        """Logits of a stream that was left ready for the head's norm."""
        weight = tensor(head.weight)
        logits = self.ws.get("logits." + name, (stream.h.shape[0], weight.shape[0]))
        gemv(weight, stream.hx, logits, eps=head.config.rms_eps, norm=stream.squares)
        return logits

    def sample(
        self,
        logits: Tensor,
        head: HeadWeights,
        row: Tensor | None,
        out: Tensor,
        m: int,
        pos: Tensor,
        add: int,
    ) -> None:
        """Keyed-noise argmax into ``out [B, >= m]`` for tokens at ``pos + add + j``."""
        lanes, v = self.lanes, logits.shape[1]
        parts = triton.cdiv(v, SAMPLE_CHUNK)
        pdl = triton_config.PDL
        rows = self.batch * m
        ids = None
        if head.ids is not None:
            key = ("ids", head.ids.data_ptr())
            if key not in self.ws.buffers:
                self.ws.buffers[key] = head.ids.to(torch.int32)
            ids = self.ws.buffers[key]
        sample_kernel[(parts, rows)](
            logits,
            ids if ids is not None else lanes.row,
            row if row is not None else lanes.row,
            lanes.temperature,
            lanes.seed,
            pos,
            lanes.banned,
            lanes.ban_until,
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
        w, lanes = self.weights, self.lanes
        mtp = w.mtp
        assert mtp is not None
        head = draft_head(w.head, mtp.norm, self.head_rows)
        # Every committed row enters the cache; one row a sequence goes on to the first draft.
        stream = self.mtp_step(
            trunk.h, None, lanes.record, w.head.norm, m, self.rows(lanes.pos, m), "ingest"
        )
        logits = self.project("draft", stream, head)
        self.sample(logits, head, None, lanes.tokens[:, 1:], 1, lanes.next_pos, 1)
        for i in range(1, self.k):
            at = self.rows(lanes.chain_pos[i], 1)
            stream = self.mtp_step(stream.h, None, lanes.tokens[:, i:], mtp.norm, 1, at, "chain")
            out = lanes.tokens[:, i + 1 :]
            logits = self.project("draft", stream, head)
            self.sample(logits, head, None, out, 1, lanes.next_pos, i + 1)

    def mtp_step(
        self,
        h: Tensor,
        row: Tensor | None,
        tokens: Tensor,
        final: Tensor,
        m: int,
        rows: Rows,
        name: str,
        cache_only: bool = False,
    ) -> Stream:
        """The MTP layer over rows of ``h``; returns the stream of one row a sequence."""
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
        mixer, ffn, cache = mtp.layer.mixer, mtp.layer.ffn, self.state.mtp
        gemv(fc, x, None, stream=stream, add=False, gain=self.gain(mixer.norm))
        assert isinstance(mixer, AttentionWeights) and cache is not None
        gain = self.gain(ffn.norm)
        if cache_only:
            attention_ops.run(stream, mixer, cache, rows, self.ws, gain)
            return stream
        last = stream if m == 1 else self.stream("chain", self.batch)
        if m == 1:
            attention_ops.run(stream, mixer, cache, rows, self.ws, gain)
        else:
            only = self.lanes.row
            attention_ops.run(stream, mixer, cache, rows, self.ws, gain, row=only, into=last)
        if isinstance(ffn, MoeWeights):
            moe_ops.run(last, ffn, self.ws, self.gain(mtp.norm))
        else:
            mlp_ops.run(last, ffn, self.ws, self.gain(mtp.norm))
        return last

    def capture(self, part: str = "run") -> None:
        """Record ``part`` ("run", "verify" or "finish") as a graph. The lanes are parked on the
        null slot meanwhile: no running sequence is touched. Replays allocate nothing."""
        lanes = self.lanes
        kept = [t.clone() for t in lanes.per_lane()]
        for lane in range(self.batch):
            lanes.leave(lane, self.state.null_slot)
        body = getattr(self, part)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            body()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        self.graphs[part] = graph
        for mine, old in zip(lanes.per_lane(), kept, strict=True):
            mine.copy_(old)

    def replay(self, part: str = "run") -> None:
        if part not in self.graphs:
            self.capture(part)
        self.graphs[part].replay()


@dataclass(slots=True)
class Feed:
    """Prompt tokens eight at a time through the decode kernels: state only, no logits.

    Rows are computed as in decoding, so a prompt's state does not depend on how it is split; what
    padding rows leave lies beyond the prompt and is overwritten before it is read.
    """

    weights: ModelWeights
    state: State
    ws: Workspace
    lanes: Lanes  # one lane of its own
    graph: torch.cuda.CUDAGraph | None = None

    @staticmethod
    def make(weights: ModelWeights, state: State, ws: Workspace) -> Feed:
        return Feed(weights, state, ws, Lanes.make(1, state.null_slot, weights.embed.device))

    def run(self) -> None:
        one = Round(self.weights, self.state, self.lanes, self.ws, FEED - 1, mtp=False)
        one.layers()
        mtp = self.weights.mtp
        if mtp is not None:
            trunk = one.stream("trunk", FEED)
            at = one.rows(self.lanes.pos, FEED)
            one.mtp_step(
                trunk.h, None, self.lanes.tokens[:, 1:], self.weights.head.norm, FEED, at, "feed",
                cache_only=True,
            )  # fmt: skip
        slot = self.lanes.slot.long()
        self.state.folded.scatter_(0, slot, self.lanes.pos)

    def prompt(self, slot: int, tokens: Tensor, start: int, end: int) -> None:
        """Put ``tokens[start:end]`` (i32, on the device) into ``slot``. ``tokens`` continues for
        at least FEED + 1 entries beyond ``end``; ``tokens[end]`` is the true next token."""
        lanes = self.lanes
        if self.graph is None:
            self.capture()
        assert self.graph is not None
        lanes.slot.fill_(slot)
        for first in range(start, end, FEED):
            lanes.tokens[0, : FEED + 1].copy_(tokens[first : first + FEED + 1])
            lanes.next_pos.fill_(first)
            self.graph.replay()

    def capture(self) -> None:
        self.lanes.leave(0, self.state.null_slot)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()


def load_cuda_engine(*args: object, **kwargs: object) -> object:
    """See :func:`vkengine.gpu_engine.load_cuda_engine`."""
    from .gpu_engine import load_cuda_engine as load

    return load(*args, **kwargs)  # type: ignore[arg-type]


def tensor(w: object) -> Tensor:
    """A GPU matrix is a plain tensor."""
    assert isinstance(w, Tensor)
    return w


def draft_head(head: HeadWeights, norm: Tensor, rows: int | None) -> HeadWeights:
    """The head under the MTP layer's norm, cut to the first ``rows`` ids when it has no map."""
    weight = tensor(head.weight)
    if rows is not None and rows < weight.shape[0] and head.ids is None:
        weight = weight[:rows]
    return HeadWeights(head.config, norm, weight, head.ids)
