"""Rounds of the GPU engine that the host has a part in: processors, logprobs, proposed drafts.

A verify graph leaves the logits, torch chooses the tokens on the device, a finish graph accepts and
commits them: the tokens of a round that the kernels run alone, at one synchronisation a round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .lanes import WIDTH
from .ops.sample import process, row_key
from .ops.sample.noise import gumbel
from .sequence import Sequence

if TYPE_CHECKING:
    from .gpu_engine import GpuEngine


class GuidedRounds:
    """Mixed into :class:`~vkengine.gpu_engine.GpuEngine`."""

    def _guided_round(self: GpuEngine) -> None:
        """Verify graph, processors and noise in torch, finish graph, one synchronisation."""
        drafts = [self._host_drafts(i, s) for i, s in enumerate(self.lane)]
        one = self._current()
        m = one.k + 1
        one.replay("verify")
        logits = one.logits
        rows = []
        for i, s in enumerate(self.lane):
            own = logits[i * m : (i + 1) * m]
            rows.append(self._choose(own, s, drafts[i]))
        y = one.y
        for i, row in enumerate(rows):
            y[i].copy_(row)
        one.replay("finish")
        who, kept = list(self.lane), None
        if any(s.params.logprobs is not None for s in who):
            kept = logits.clone()
        self._fly(one, 1)
        flight = self.flights.pop()
        flight.done.synchronize()
        for i, (s, row) in enumerate(zip(who, flight.records[0].tolist(), strict=False)):
            own = kept[i * m : (i + 1) * m] if kept is not None else None
            self._take(s, flight.proposed[i], row[: row[WIDTH - 1]], own)

    def _host_drafts(self: GpuEngine, lane: int, s: Sequence) -> list[int]:
        """The drafts that the next round verifies; those the host proposes are written down."""
        depth = self._depth(s)
        if s.ngram is not None or s.oracle is not None:
            proposed: list[int] = []
            if depth and s.output:
                if s.ngram is not None:
                    proposed = s.ngram.propose(depth)
                elif s.oracle is not None:
                    proposed = s.oracle.propose(len(s.output), depth)
            if proposed:
                ids = torch.tensor(proposed, dtype=torch.int32, device=self.device)
                self.lanes.tokens[lane, 1 : 1 + len(proposed)] = ids
            self.lanes.limit[lane] = len(proposed)
            self.limits[s.request_id] = len(proposed)
            return proposed
        count = self.limits[s.request_id]
        if count and s.sampler.processors.penalises:
            return self.lanes.tokens[lane, 1 : 1 + count].tolist()
        return [0] * count

    def _choose(self: GpuEngine, logits: Tensor, s: Sequence, drafts: list[int]) -> Tensor:
        """Tokens [M] i32 after the rows of ``logits``; rows without a draft count for nothing."""
        sampler = s.sampler
        m = logits.shape[0]
        drafts = (drafts + [0] * m)[: m - 1]
        x = process(logits, sampler.processors, sampler.generated, drafts)
        if sampler.processors.temperature > 0:
            ids = torch.arange(self.vocab_size, dtype=torch.int32, device=self.device)
            noise = [
                gumbel(row_key(sampler.seed, s.params.choice, s.position + 1 + j), ids)
                for j in range(m)
            ]
            x = x + torch.stack(noise)
        best = torch.argmax(x, dim=-1).to(torch.int32)
        return torch.where(torch.isfinite(logits).all(dim=-1), best, -1)
