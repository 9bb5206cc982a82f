"""Prompts of exact length, built once a run and stored, so that every arm gets the same ids."""

from __future__ import annotations

import random
from collections.abc import Callable

from finalbench.record import Cell, PromptRecord
from finalbench.runtime.server import LiveServer
from finalbench.scenario import Scenario, digest


class PromptStock:
    """The prompts of a run: read from disk when it is resumed, else built from a live server."""

    def __init__(
        self,
        scenario: Scenario,
        stored: tuple[PromptRecord, ...],
        on_new: Callable[[PromptRecord], None],
    ) -> None:
        self._scenario = scenario
        self._on_new = on_new
        self._known = {(p.seq_len, p.warmup, p.index): p for p in stored}

    def prepare(self, server: LiveServer, seq_len: int, count: int) -> None:
        """Build what is missing for one length. `count` is of measured prompts."""
        wanted = [(False, i) for i in range(count)]
        wanted += [(True, i) for i in range(self._scenario.workload.warmup_requests)]
        for warmup, index in wanted:
            if (seq_len, warmup, index) not in self._known:
                prompt = self._build(server, seq_len, warmup=warmup, index=index)
                self._known[seq_len, warmup, index] = prompt
                self._on_new(prompt)

    def measured(self, cell: Cell, indices: list[int]) -> list[PromptRecord]:
        return [self._known[cell.seq_len, False, i] for i in indices]

    def warmups(self, seq_len: int) -> list[PromptRecord]:
        count = self._scenario.workload.warmup_requests
        return [self._known[seq_len, True, i] for i in range(count)]

    def by_digest(self, value: str) -> PromptRecord:
        return next(p for p in self._known.values() if p.digest == value)

    def _build(self, server: LiveServer, seq_len: int, *, warmup: bool, index: int) -> PromptRecord:
        seed = f"{self._scenario.workload.seed}-{seq_len}-{warmup}-{index}"
        vocab = int(server.settings.get("vocab_size", 256))
        ids = tuple(random.Random(seed).randrange(vocab) for _ in range(seq_len))
        return PromptRecord(
            seq_len=seq_len,
            index=index,
            warmup=warmup,
            domain=None,
            digest=digest(list(ids)),
            token_ids=ids,
        )
