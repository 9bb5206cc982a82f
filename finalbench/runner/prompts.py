"""Prompts of exact length, built once a run and stored, so that every arm gets the same ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from finalbench.arms import ENGINES, arm, vocabulary_size
from finalbench.client.workload import PromptSpec, ServerTokenizer, build_prompts
from finalbench.prompts import DOMAINS
from finalbench.record import Cell, PromptRecord
from finalbench.runtime.asking import asking
from finalbench.runtime.server import LiveServer
from finalbench.scenario import Scenario, Workload, cached_share

Group = tuple[int, str]  # cells of one length and cache state share their prompts
Phase = Literal["warmup", "prime", "measure"]

_TIMEOUT_S = 60.0
_MAX_WARM_PROMPTS = 256


def check_lengths(scenario: Scenario, cells: Sequence[Cell]) -> None:
    """Before any server starts. Errors: `UsageError` for lengths or domains without prompts."""
    for cell in cells:
        _spec(scenario.workload, _group(cell), cell.requests, warmup=False).check()


class PromptStock:
    """The prompts of a run: read from disk when it is resumed, else built from a live server."""

    def __init__(
        self,
        scenario: Scenario,
        stored: tuple[PromptRecord, ...],
        on_new: Callable[[PromptRecord], None],
    ) -> None:
        self._workload = scenario.workload
        self._on_new = on_new
        # Random ids of random weights need no tokenizer, and there often is none.
        self._vocabulary = (
            vocabulary_size(
                {
                    "model": scenario.model.name,
                    "path": scenario.model.path,
                    "weights": scenario.serving.weights,
                }
            )
            if scenario.workload.text_class == "random"
            and scenario.serving.weights.startswith("random")
            else None
        )
        self._known = {(p.seq_len, p.cache, p.warmup, p.index): p for p in stored}

    def prepare(self, server: LiveServer, cells: list[Cell]) -> None:
        """Build what is missing. Errors: `UsageError`, `EnvironmentMissing` without `/tokenize`."""
        counts: dict[Group, int] = {}
        for cell in cells:
            counts[_group(cell)] = max(counts.get(_group(cell), 0), cell.requests)
        with asking(server.base_url, timeout_s=_TIMEOUT_S) as http:
            field = ENGINES[arm(cells[0].arm).engine].tokenize_field
            tokenizer = ServerTokenizer(http, server.base_url, server.model_id, field)
            for group, count in counts.items():
                self._build(tokenizer, group, count, warmup=False)
                warm = max(self._warmups(c) for c in cells if _group(c) == group)
                if warm:
                    self._build(tokenizer, group, warm, warmup=True)

    def phases(self, cell: Cell, indices: list[int]) -> list[tuple[Phase, list[PromptRecord]]]:
        """What is sent for a cell, in order. A warm cell sends what it will measure once before."""
        found: list[tuple[Phase, list[PromptRecord]]] = [("warmup", self.warmups(cell))]
        if cell.cache == "warm":
            found.append(("prime", self.measured(cell, indices)))
        found.append(("measure", self.measured(cell, indices)))
        return [(phase, prompts) for phase, prompts in found if prompts]

    def measured(self, cell: Cell, indices: list[int]) -> list[PromptRecord]:
        """Prompts of a cell by their index."""
        return [self._known[*_group(cell), False, i] for i in indices]

    def warmups(self, cell: Cell) -> list[PromptRecord]:
        """Prompts that no measured request has; as many as its warm-up may use."""
        return [self._known[*_group(cell), True, i] for i in range(self._warmups(cell))]

    def _warmups(self, cell: Cell) -> int:
        rule = self._workload.warm_rule
        if rule is None:
            return self._workload.warmup_requests
        # Many streams take few rounds: their prompts must all be built first.
        most = max(rule.window, _MAX_WARM_PROMPTS // cell.concurrency)
        return min(rule.max_rounds, most) * cell.concurrency

    def by_digest(self, value: str) -> PromptRecord:
        return next(p for p in self._known.values() if p.digest == value)

    def _build(self, tokenizer: ServerTokenizer, group: Group, count: int, *, warmup: bool) -> None:
        if all((*group, warmup, i) in self._known for i in range(count)):
            return
        spec = _spec(self._workload, group, count, warmup=warmup)
        known = None if self._vocabulary is None else range(self._vocabulary)
        for prompt in build_prompts(spec, tokenizer, known):
            if (*group, warmup, prompt.index) in self._known:
                continue
            record = PromptRecord(
                seq_len=spec.length,
                index=prompt.index,
                warmup=warmup,
                domain=prompt.domain,
                digest=prompt.digest,
                token_ids=prompt.token_ids,
                cache=group[1],
            )
            self._known[*group, warmup, prompt.index] = record
            self._on_new(record)


def _group(cell: Cell) -> Group:
    return cell.seq_len, cell.cache


def _spec(workload: Workload, group: Group, count: int, *, warmup: bool) -> PromptSpec:
    """Cells of one state have a salt of their own, so that none warms another's prompts."""
    length, cache = group
    return PromptSpec(
        length=length,
        count=count,
        group=str(length) if cache == "cold" else f"{length}/{cache}",
        seed=workload.seed,
        text_class=workload.text_class,
        domains=workload.domains or tuple(DOMAINS),
        purpose="warmup" if warmup else "measure",
        shared_share=cached_share(cache) if cache != "warm" else 0.0,
    )
