"""A server's counters over one cell: growth between two scrapes of `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping

from finalbench.client.scrape import CounterReset, Scrape, delta, draft_counters
from finalbench.record import CounterWindow, Spec

GENERATED = "generation_tokens"
PREFIX = ("prefix_cache_queries", "prefix_cache_hits")


def count_window(
    cell_id: str, before: Scrape, after: Scrape | None, *, drafts: bool, names: Mapping[str, str]
) -> CounterWindow | None:
    """None where nothing was counted, or another process answered. `names`: its name -> vLLM's.

    `drafts`: its speculative counters are wanted, since they do not come with each request.
    """
    if after is None:
        return None
    try:
        queries, hits = (_prefix(before, after, name, names) for name in PREFIX)
        counted = draft_counters(before, after) if drafts else None
        tokens = delta(before, after, GENERATED) if counted is not None else None
    except CounterReset:
        return None
    if counted is None and hits is None:
        return None
    return CounterWindow(
        cell_id=cell_id,
        generation_tokens=None if tokens is None else round(tokens),
        spec=None
        if counted is None
        else Spec(
            drafts=round(counted.drafts),
            draft_tokens=round(counted.draft_tokens),
            accepted_tokens=round(counted.accepted),
            accepted_per_pos=tuple(round(n) for n in counted.accepted_per_pos),
        ),
        prefix_queries=queries,
        prefix_hits=hits,
    )


def _prefix(before: Scrape, after: Scrape, name: str, names: Mapping[str, str]) -> int | None:
    late = prefix_total(after, name, names)
    if late is None:
        return None
    growth = late - (prefix_total(before, name, names) or 0.0)
    if growth < 0:
        raise CounterReset(f"{name} fell by {-growth:g}: the server restarted")
    return round(growth)


def prefix_total(scrape: Scrape, name: str, names: Mapping[str, str]) -> float | None:
    """Prompt tokens looked up or found so far; None where the server does not count them."""
    own = next((theirs for theirs, ours in names.items() if ours == name), name)
    return scrape.total(own)
