"""Rounds in flight on a GPU: what is launched ahead of the records that the host has read.

At most two graphs wait at a time, so that the device always has the next one; a graph is one round,
or two where no request can end in the first of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .graph import Round
from .lanes import TURNS, WIDTH
from .sequence import Sequence

if TYPE_CHECKING:
    from .gpu_engine import GpuEngine

#: Rounds the kernels hold; deeper drafts are cut to it.
MAX_K = 7
#: Draft head rows when a request does not say.
HEAD_ROWS = 32768


@dataclass(slots=True)
class Flight:
    """Rounds launched as one graph: who was in which lane, and where the records will land."""

    who: list[Sequence]
    proposed: list[int]  # drafts that each lane's first round verifies
    records: list[Tensor]  # of each round [B, 16] i32, pinned
    done: torch.cuda.Event


class Flights:
    """Mixed into :class:`~vkengine.gpu_engine.GpuEngine`."""

    def _worth_another(self: GpuEngine) -> bool:
        """One more round may be launched ahead unless every lane may end with the one in flight."""
        if len(self.flights) > 1:
            return False
        ahead = self._ahead()
        return any(
            len(s.output) + ahead < s.params.max_tokens
            and s.position + ahead + MAX_K + 1 < s.limit
            and s.auto is None
            for s in self.lane
        )

    def _ahead(self: GpuEngine) -> int:
        """Tokens of the first lane that the rounds in flight may bring at most."""
        drafts = sum(flight.proposed[0] if flight.proposed else 0 for flight in self.flights)
        return drafts + sum(len(flight.records) for flight in self.flights)

    def _pair(self: GpuEngine, one: Round) -> bool:
        """Whether two rounds may go as one graph, which saves the pause between two graphs: without
        drafts, after the first token, and where no lane ends by length in the first of them."""
        ahead = self._ahead()
        return (
            self.pairs
            and one.k == 0
            and all(
                s.output
                and not s.draft.active
                and len(s.output) + ahead + 2 <= s.params.max_tokens
                and s.position + ahead + 2 < s.limit
                for s in self.lane
            )
        )

    def _launch(self: GpuEngine) -> None:
        one = self._current()
        pair = self._pair(one)
        one.replay("twice" if pair else "run")
        self._fly(one, 2 if pair else 1)

    def _fly(self: GpuEngine, one: Round, rounds: int) -> None:
        """Note what a graph of ``rounds`` rounds will bring."""
        turns = range(self.turn + 1, self.turn + 1 + rounds)
        records = [one.lanes.host[turn % TURNS] for turn in turns]
        self.turn += rounds
        done = torch.cuda.Event()
        done.record()
        proposed = [min(self.limits[s.request_id], one.k) for s in self.lane]
        for s in self.lane:
            cap = MAX_K if s.auto is not None else self._depth(s)
            self.limits[s.request_id] = min(one.k, cap) if one.mtp else 0
        self.flights.append(Flight(list(self.lane), proposed, records, done))

    def _land_all(self: GpuEngine) -> None:
        while self.flights:
            self._land()

    def _land(self: GpuEngine) -> None:
        """Read the oldest graph's records and hand out their tokens."""
        flight = self.flights.pop(0)
        flight.done.synchronize()
        for record in flight.records:
            for s, proposed, row in zip(flight.who, flight.proposed, record.tolist(), strict=False):
                if self._running.get(s.request_id) is not s or s.finish is not None:
                    continue
                self._take(s, proposed, row[: row[WIDTH - 1]], None)
