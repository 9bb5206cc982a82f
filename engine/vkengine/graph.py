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

from .graph_draft import draft
from .lanes import TURNS, WIDTH, Lanes
from .models.layout import (
    AttentionWeights,
    GdnWeights,
    HeadWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
)
from .ops.accept.triton import accept_kernel
from .ops.attention import triton as attention_ops
from .ops.embed.triton import embed_kernel
from .ops.gdn import triton as gdn_ops
from .ops.head.triton import sample_kernel
from .ops.mlp import triton as mlp_ops
from .ops.moe import triton as moe_ops
from .ops.triton_config import hand_over_mode
from .ops.triton_launch import Stream, centred, counter, gemv, group_of, tensor
from .rows import Rows, Workspace
from .sampler import ACCEPTANCE_CHOICE
from .state import AttentionState, GdnState, State

#: Vocabulary entries per program of the sampler.
SAMPLE_CHUNK = 2048


def first_product(mixer: GdnWeights | AttentionWeights) -> Tensor:
    """The weight that reads the stream first."""
    return tensor(mixer.w_qkv if isinstance(mixer, AttentionWeights) else mixer.w_in)


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

    def twice(self) -> None:
        """Two rounds."""
        self.run()
        self.run()

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
        pdl = hand_over_mode(w.embed.device, early=True)
        embed_kernel[(rows,)](
            lanes.tokens,
            w.embed,
            self.gain(w.layers[0].mixer.norm),
            stream.h,
            stream.hx,
            stream.squares,
            lanes.pos,
            lanes.next_pos,
            lanes.turn,
            WIDTH,
            c.vocab_size,
            M=m,
            H=c.hidden_size,
            HP=hp,
            GROUP=group_of(c.hidden_size),
            PDL=pdl,
            launch_pdl=pdl > 0,
        )
        at = self.rows(lanes.pos, m)
        for i, layer in enumerate(w.layers):
            last = i + 1 == len(w.layers)
            norm = w.head.norm if last else w.layers[i + 1].mixer.norm
            after = tensor(w.head.weight) if last else first_product(w.layers[i + 1].mixer)
            self.layer(stream, layer, self.state.layers[i], at, self.gain(norm), after, i)
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
        pdl = hand_over_mode(lanes.pos.device, early=True)
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
            lanes.turn,
            lanes.host,
            WIDTH,
            lanes.host.stride(0),
            self.state.max_len,
            self.batch,
            WIDTH,
            M=m,
            MP=WIDTH,
            TURNS=TURNS,
            SALT=ACCEPTANCE_CHOICE,
            num_warps=1,
            PDL=pdl,
            launch_pdl=pdl > 0,
        )
        if self.k and self.mtp:
            draft(self, self.stream("trunk", self.batch * m), m)

    def rows(self, pos: Tensor, m: int) -> Rows:
        valid = self.ws.get("valid", (self.batch * m,), torch.bool)
        return Rows(self.lanes.slot, pos, m, valid)

    def layer(
        self,
        stream: Stream,
        layer: LayerWeights,
        state: GdnState | AttentionState | None,
        rows: Rows,
        next_gain: Tensor,
        after: Tensor,
        index: int,
    ) -> None:
        """Mixer and feed-forward. ``next_gain``: of the norm that reads the stream next; ``after``:
        the weight that does."""
        ffn, mixer = layer.ffn, layer.mixer
        gain = self.gain(ffn.norm)
        if isinstance(mixer, AttentionWeights):
            assert isinstance(state, AttentionState)
            attention_ops.run(stream, mixer, state, rows, self.ws, gain)
        else:
            assert isinstance(state, GdnState)
            gdn_ops.run(stream, mixer, state, rows, self.ws, gain)
        if isinstance(ffn, MoeWeights):
            moe_ops.run(stream, ffn, self.ws, next_gain, after)
            if self.on_moe is not None:
                r = min(8, stream.h.shape[0])
                ids = self.ws.get("moe.ids", (r, ffn.config.experts_per_token), torch.int32)
                self.on_moe(index, ids)
        else:
            mlp_ops.run(stream, ffn, self.ws, next_gain)

    def project(self, name: str, stream: Stream, head: HeadWeights) -> Tensor:
        """Logits of a stream that was left ready for the head's norm."""
        weight = tensor(head.weight)
        logits = self.ws.get("logits." + name, (stream.h.shape[0], weight.shape[0]))
        gemv(weight, stream.hx, logits, eps=head.config.rms_eps, norm=stream.squares, early=True)
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
        pdl = hand_over_mode(lanes.pos.device, early=True)
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
            launch_pdl=pdl > 0,
        )

    def capture(self, part: str = "run") -> None:
        """Record ``part`` (run, twice, verify or finish) as a graph. The lanes are parked on the
        null slot meanwhile: no running sequence is touched. Replays allocate nothing."""
        lanes = self.lanes
        moved = [*lanes.per_lane(), lanes.turn]
        kept = [t.clone() for t in moved]
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
        for mine, old in zip(moved, kept, strict=True):
            mine.copy_(old)

    def replay(self, part: str = "run") -> None:
        if part not in self.graphs:
            self.capture(part)
        self.graphs[part].replay()
