"""The models of metrics.json: one row per cell, every null with its reason."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from finalbench.metrics.acceptance import Acceptance
from finalbench.metrics.bandwidth import Memory
from finalbench.metrics.cache import NO_CACHE
from finalbench.metrics.distribution import Distribution
from finalbench.metrics.rates import Rate
from finalbench.scenario import Frozen


class Counts(Frozen):
    """Requests of a cell; ok + failed + cancelled + incomplete = recorded.

    `repeated` attempts failed or were cut, and were made again in a later roll.
    """

    scheduled: int
    recorded: int
    ok: int
    failed: int
    cancelled: int
    incomplete: int
    repeated: int
    warmup: int


class BlockRow(Frozen):
    """One cell in one block, that is in one fresh server process, unless that one died."""

    block: int
    server_ids: tuple[str, ...]
    order_index: int | None
    decode: Rate
    e2e: Rate
    steady: Rate
    acceptance: Acceptance


class DomainRow(Frozen):
    """The same cell by prompt domain."""

    domain: str
    requests: int
    decode_tok_s: float | None
    acceptance_length: float | None
    reason: str | None = None


class CellRow(Frozen):
    """One row of the table. Every null has its reason in `reasons`, by field name."""

    id: str
    pair_key: str
    model: str
    arm: str
    axis: str
    seq_len: int
    output_len: int
    sampling: str
    sampling_fields: dict[str, float | int]
    draft: dict[str, Any]
    draft_label: str
    concurrency: int
    text_class: Literal["natural", "random"]
    domain: str | None
    runtime: str | None
    counts: Counts
    token_source: str | None
    decode_tok_s: float | None
    decode_tok_s_blocks: tuple[float | None, ...]
    decode_tok_s_interval: tuple[float, float] | None
    e2e_tok_s: float | None
    steady_tok_s: float | None
    peak_tok_s: float | None
    rates: dict[str, Rate]
    latencies: dict[str, Distribution]
    tpot_token_weighted_s: float | None
    acceptance: Acceptance
    acceptance_length: float | None
    goodput_share: float | None
    bandwidth_share: float | None
    limit_tok_s: float | None
    bytes_per_step: int | None
    blocks: tuple[BlockRow, ...]
    domains: tuple[DomainRow, ...]
    reasons: dict[str, str]
    cache: str = "cold"
    cache_hit_share: float | None = None

    @property
    def cache_label(self) -> str:
        """What prompts met, planned and counted; empty for a cell that is cold as ever."""
        if self.cache == "cold":
            return ""
        if self.cache_hit_share is not None:
            return f"{self.cache} prompts, {self.cache_hit_share:.0%} from the cache"
        absent = self.reasons.get("cache_hit_share") == NO_CACHE
        return f"{self.cache} prompts, {'no cache' if absent else 'cache not counted'}"

    @model_serializer(mode="wrap")
    def _known(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Runs that counted no cache have rows without these fields, as when they were sealed."""
        row: dict[str, Any] = handler(self)
        if self.cache == "cold" and self.cache_hit_share is None:
            del row["cache"], row["cache_hit_share"]
        return row


class MetricsTable(Frozen):
    """metrics.json."""

    schema_version: Literal[1] = 1
    run_id: str
    memory: Memory
    cells: tuple[CellRow, ...]

    def cell(self, cell_id: str) -> CellRow:
        return next(c for c in self.cells if c.id == cell_id)
