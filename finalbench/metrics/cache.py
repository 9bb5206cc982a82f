"""What measured prompts found in a server's prefix cache, by its own counters over each cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finalbench.plan import Cell
from finalbench.record import CounterWindow, RequestRecord, ServerRecord

NO_CACHE = "the server has no prefix cache: every prompt was computed in full"
NOT_COUNTED = "the server does not count what its prefix cache serves"


@dataclass(frozen=True, slots=True)
class CacheUse:
    """`hit_share`: prompt tokens found in the cache / prompt tokens sent; null with a reason."""

    hit_share: float | None
    reason: str | None = None


def cache_window(server: ServerRecord | None, cell: Cell) -> CounterWindow | None:
    """The counters over this cell's measured requests, where hits were among them."""
    windows = () if server is None else server.windows
    found = (w for w in windows if w.cell_id == cell.id and w.prefix_hits is not None)
    return next(found, None)


def without_cache(server: ServerRecord, window: CounterWindow) -> bool:
    """It says so itself, or it looked nothing up."""
    told = (server.settings or {}).get("prefix_caching")
    return not window.prefix_hits and (told is False or window.prefix_queries == 0)


def cache_use(
    cell: Cell, requests: Sequence[RequestRecord], servers: Mapping[str, ServerRecord]
) -> CacheUse | None:
    """Over all servers of a cell; None for a cold cell whose servers counted nothing.

    `requests` are all of the cell; warm-ups lie outside of the windows and are left out.
    """
    sent: dict[str, int] = {}
    for request in requests:
        if not request.warmup:
            sent[request.server_id] = sent.get(request.server_id, 0) + request.prompt_tokens
    known = {i: servers[i] for i in sent if i in servers}
    windows = {i: w for i, s in known.items() if (w := cache_window(s, cell)) is not None}
    if not windows or len(windows) < len(sent):
        return None if cell.cache == "cold" else CacheUse(None, NOT_COUNTED)
    if all(without_cache(known[i], w) for i, w in windows.items()):
        return CacheUse(None, NO_CACHE)
    hits = sum(w.prefix_hits or 0 for w in windows.values())
    return CacheUse(hits / sum(sent.values()))
