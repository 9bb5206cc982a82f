"""Prompts met what the cell's cache state says: by the server's counters over the cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from finalbench.metrics import cache_window, without_cache
from finalbench.plan import Cell
from finalbench.record import CounterWindow, RequestRecord, ServerRecord
from finalbench.validity.violation import Violation, violation

# A cache keeps whole blocks and computes at least the last token, so a prompt finds up to a block
# less than it shares: 64 tokens in the servers known, an eighth of a short prompt.
BLOCK_TOKENS = 64
LEAST_SLACK = 16


def check_cache(
    cell: Cell, requests: Sequence[RequestRecord], servers: Mapping[str, ServerRecord]
) -> Iterator[Violation]:
    """`requests` are all of the cell; each server that measured some of them is judged alone."""
    sent: dict[str, int] = {}
    for request in requests:
        if not request.warmup:
            sent[request.server_id] = sent.get(request.server_id, 0) + 1
    absent: list[str] = []
    for server_id, count in sent.items():
        server = servers.get(server_id)
        window = cache_window(server, cell)
        if server is None or window is None:
            if cell.cache != "cold":
                yield _uncounted(cell, server_id)
        elif cell.cache == "cold":
            yield from _cold(cell, server, window)
        elif without_cache(server, window):
            absent.append(server_id)
        else:
            yield from _shared(cell, server, window, count)
    if absent:
        yield violation(
            "cache_absent",
            f"{absent[0]} has no prefix cache: its {cell.cache} prompts were computed in full",
            cell_id=cell.id,
            servers=len(absent),
        )


def _uncounted(cell: Cell, server_id: str) -> Violation:
    return violation(
        "cache_state",
        f"server {server_id} does not count what its prefix cache serves, so {cell.cache} prompts "
        "are not shown to be so",
        cell_id=cell.id,
    )


def _cold(cell: Cell, server: ServerRecord, window: CounterWindow) -> Iterator[Violation]:
    if window.prefix_hits:
        yield violation(
            "warm_prefix",
            f"server {server.server_id}: {window.prefix_hits} prompt tokens of a cold cell came "
            "from its prefix cache",
            cell_id=cell.id,
            block=server.block,
            hits=window.prefix_hits,
        )


def _shared(
    cell: Cell, server: ServerRecord, window: CounterWindow, count: int
) -> Iterator[Violation]:
    found = (window.prefix_hits or 0) / count
    slack = min(BLOCK_TOKENS, max(LEAST_SLACK, cell.seq_len // 8))
    if abs(found - cell.shared_tokens) > slack:
        yield violation(
            "cache_state",
            f"server {server.server_id}: {found:.0f} tokens a prompt came from its prefix cache, "
            f"a {cell.cache} cell plans {cell.shared_tokens}",
            cell_id=cell.id,
            block=server.block,
            found=found,
            planned=cell.shared_tokens,
            slack=slack,
        )
