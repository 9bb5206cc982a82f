"""A prompt through the decode kernels: where every position's logits are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .graph import Round
from .graph_draft import mtp_step
from .lanes import Lanes
from .models.layout import ModelWeights
from .rows import Workspace
from .state import State

#: Prompt rows per launch: as many as a round may leave pending.
FEED = 8


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
            following, final = self.lanes.tokens[:, 1:], self.weights.head.norm
            mtp_step(one, trunk.h, following, final, FEED, at, "feed", cache_only=True)
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

    def logits(self, slot: int, tokens: Tensor, end: int) -> Iterator[tuple[int, Tensor]]:
        """``prompt`` from the start; after each launch (its first position, its rows' logits)."""
        one = Round(self.weights, self.state, self.lanes, self.ws, FEED - 1, mtp=False)
        for first in range(0, end, FEED):
            last = min(first + FEED, end)
            self.prompt(slot, tokens, first, last)
            logits = one.project("score", one.stream("trunk", FEED), self.weights.head)
            yield first, logits[: last - first]

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
