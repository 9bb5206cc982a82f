"""How much the client itself can take, measured once a run at each concurrency of the plan."""

from __future__ import annotations

import asyncio

from finalbench.client.ceiling import measure
from finalbench.errors import EnvironmentMissing
from finalbench.record import ClientCeiling, Plan

_SECONDS = 0.5


def client_ceilings(plan: Plan) -> tuple[ClientCeiling, ...]:
    """One token a chunk, the dearest chunking there is; some two seconds for each concurrency."""
    streams = sorted({cell.concurrency for cell in plan.cells})
    return tuple(_ceiling(count) for count in streams)


def _ceiling(streams: int) -> ClientCeiling:
    try:
        found = asyncio.run(measure(tokens_per_chunk=1, streams=streams, seconds=_SECONDS))
    except EnvironmentMissing as error:
        return ClientCeiling(
            streams=streams,
            tokens_per_chunk=1,
            chunks_per_s=None,
            added_p50_ms=None,
            added_p99_ms=None,
            reason=str(error),
        )
    return ClientCeiling(
        streams=streams,
        tokens_per_chunk=1,
        chunks_per_s=found.chunks_per_s,
        added_p50_ms=found.added_p50_ms,
        added_p99_ms=found.added_p99_ms,
        waited_share=found.waited_share,
        scheduling=found.scheduling,
    )
