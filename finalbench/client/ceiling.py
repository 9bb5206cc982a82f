"""What the client itself can take, against the toy server at a cell's own chunking.

A cell whose chunk rate comes near the ceiling measures the client, not the server.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from finalbench.client.connection import Clock
from finalbench.client.http import StreamClient
from finalbench.client.load import run_cell
from finalbench.client.schedule import NS, CellRun, Job, Load, Outcome
from finalbench.client.stream import encode_body
from finalbench.client.turn import Scheduling
from finalbench.errors import EnvironmentMissing
from finalbench.runtime.asking import asking
from finalbench.testing.launch import toy

HEADROOM = 3.0  # a cell needs a ceiling this many times its own chunk rate
BURST_STREAMS = 1024
MAX_ADDED_MS = 10.0  # p99 of lateness above which a time stamp is not the server's
_LONG = 1_000_000  # tokens; such a request always outlives the measurement


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One measurement. Toy server and client share the machine, so this is a lower bound.

    `added_p50_ms`, `added_p99_ms`: from the server writing a chunk to the client's time stamp, at
    half of `chunks_per_s`. `burst_drain_ms`: from the first chunk written to the last one read
    when `burst_streams` streams step at the same moment; median over the bursts.
    None where too little was seen. `waited_share`: of the time at half load, how much the client
    waited for a core that others had; `scheduling`: whether it may take one from them.
    """

    tokens_per_chunk: int
    streams: int
    chunks_per_s: float
    half_load_chunks_per_s: float
    added_p50_ms: float | None
    added_p99_ms: float | None
    burst_streams: int
    burst_drain_ms: float | None
    seconds: float
    waited_share: float | None = None
    scheduling: Scheduling = "shared"

    def as_dict(self) -> dict[str, float | int | str | None]:
        return asdict(self)


def client_bound(
    ceiling: Ceiling,
    chunks_per_s: float,
    *,
    headroom: float = HEADROOM,
    max_added_ms: float = MAX_ADDED_MS,
) -> str | None:
    """Why a cell of that chunk rate measures the client rather than the server, or None.

    A slow client may keep up by reading many chunks at once; then its time stamps are late, so
    the added latency is judged as well as the rate.
    """
    if chunks_per_s * headroom > ceiling.chunks_per_s:
        return (
            f"the client reads at most {ceiling.chunks_per_s:.0f} chunks/s, less than "
            f"{headroom:g} times the cell's {chunks_per_s:.0f}"
        )
    if ceiling.added_p99_ms is None:
        return "the lateness of the client's time stamps could not be measured"
    if ceiling.added_p99_ms > max_added_ms:
        return (
            f"the client's time stamps are up to {ceiling.added_p99_ms:.1f} ms late, more than "
            f"{max_added_ms:g} ms"
        )
    return None


async def measure(
    *,
    tokens_per_chunk: int = 1,
    streams: int = 64,
    prompt_tokens: int = 16,
    seconds: float = 2.0,
    burst_streams: int | None = None,
    clock: Clock = time.monotonic_ns,
) -> Ceiling:
    """Starts a toy server of its own and measures for about 3 x `seconds`.

    `streams`, `tokens_per_chunk` and `prompt_tokens` should be those of the cell.
    EnvironmentMissing when the server does not start or nothing can be measured.
    """
    burst = streams if burst_streams is None else burst_streams
    chunking = f"tokens_per_chunk={tokens_per_chunk},stamp=true"
    with toy(f"fast,{chunking}") as server, asking(server.base_url, timeout_s=30.0) as http:

        async def run(behaviour: str, count: int) -> CellRun:
            http.post(f"{server.base_url}/toy/behaviour", content=behaviour).raise_for_status()
            async with StreamClient(clock) as client:
                load = Load(concurrency=count, time_limit_s=seconds)
                return await run_cell(client, server.base_url, _jobs(count, prompt_tokens), load)

        top = chunk_rate((await run(f"fast,{chunking}", streams)).outcomes)
        if top <= 0:
            raise EnvironmentMissing(f"no chunk of {streams} streams arrived within {seconds:g} s")
        # Streams step at their own times: each starts with a delay of its own.
        step_ms = 2000.0 * streams / top
        half = await run(f"ok,{chunking},step_ms={step_ms:.4f},jitter=0.9", streams)
        added = sorted(added_ns(half.outcomes))
        burst_ms = max(50.0, 4000.0 * burst / top)
        bursts = await run(f"ok,{chunking},step_ms={burst_ms:.1f},sync=true", burst)
        drains = sorted(drain_times_ns(bursts.outcomes, burst))
    return Ceiling(
        tokens_per_chunk=tokens_per_chunk,
        streams=streams,
        chunks_per_s=top,
        half_load_chunks_per_s=chunk_rate(half.outcomes),
        added_p50_ms=_milliseconds(added, 0.5),
        added_p99_ms=_milliseconds(added, 0.99),
        burst_streams=burst,
        burst_drain_ms=_milliseconds(drains, 0.5),
        seconds=seconds,
        waited_share=None
        if half.waited_ns is None
        else half.waited_ns / max(1, half.ended_ns - half.started_ns),
        scheduling=half.scheduling,
    )


def _jobs(count: int, prompt_tokens: int) -> list[Job]:
    body = {"max_tokens": _LONG, "temperature": 0, "ignore_eos": True}
    rest = [7] * max(0, prompt_tokens - 2)
    return [
        Job(index, encode_body({**body, "prompt": [index % 250, index // 250, *rest]}))
        for index in range(count)
    ]


def chunk_rate(outcomes: Sequence[Outcome]) -> float:
    """Chunks/s while all streams run: from the last first chunk to the end, by socket reads."""
    starts = [outcome.result.chunks[0][0] for outcome in outcomes if outcome.result.chunks]
    if not starts:
        return 0.0
    begin = max(starts)
    inside = [at for outcome in outcomes for at, _ in outcome.result.chunks if at > begin]
    return len(inside) * NS / (max(inside) - begin) if len(inside) > 1 else 0.0


def added_ns(outcomes: Sequence[Outcome]) -> list[int]:
    """Client's time stamp minus the server's, for every chunk after the first of each stream."""
    return [
        at - written
        for outcome in outcomes
        for (at, _), written in list(
            zip(outcome.result.chunks, outcome.result.server_ns, strict=False)
        )[1:]
    ]


def drain_times_ns(outcomes: Sequence[Outcome], streams: int) -> list[int]:
    """For each burst in which nearly every stream took part: last read minus first write.

    A stream writes once a burst, so a burst ends where a stream would appear for the second time.
    """
    pairs = sorted(
        (written, at, number)
        for number, outcome in enumerate(outcomes)
        for (at, _), written in zip(outcome.result.chunks, outcome.result.server_ns, strict=False)
    )
    drains: list[int] = []
    burst: dict[int, tuple[int, int]] = {}
    for written, at, number in [*pairs, (0, 0, -1)]:
        if number in burst or number < 0:
            if len(burst) >= 0.95 * streams:
                reads = [read for _, read in burst.values()]
                drains.append(max(reads) - min(start for start, _ in burst.values()))
            burst = {}
        burst[number] = (written, at)
    return drains


def _milliseconds(ordered: Sequence[int], share: float) -> float | None:
    """Nearest-rank quantile of sorted ns, in ms; None when there are none."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] / 1e6
