"""Many requests: schedules, lag, cuts, counts."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise

import httpx2
import pytest

from finalbench.client.http import StreamClient
from finalbench.client.load import CellRun, Job, Load, Outcome, run_cell
from finalbench.client.stream import encode_body
from finalbench.errors import UsageError
from finalbench.testing.launch import ToyThread, toy

FAST = "step_ms=0,prefill_ms=0"


@pytest.fixture(scope="module")
def server() -> Iterator[ToyThread]:
    with ToyThread() as running:
        yield running


def jobs(count: int, max_tokens: int = 4) -> list[Job]:
    body = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return [Job(i, encode_body({**body, "prompt": [i % 200, i // 200, 3]})) for i in range(count)]


def run(base_url: str, todo: list[Job], load: Load, **options: object) -> CellRun:
    async def go() -> CellRun:
        async with StreamClient() as client:
            return await run_cell(client, base_url, todo, load, **options)  # type: ignore[arg-type]

    return asyncio.run(go())


@pytest.mark.parametrize("concurrency", [1, 3, 16])
def test_closed_loop_sends_everything_and_keeps_the_cap(
    server: ToyThread, concurrency: int
) -> None:
    """L06: as many connections as streams, opened beforehand."""
    url = server.use("ok,step_ms=1")
    seen: list[int] = []
    cell = run(
        url, jobs(40), Load(concurrency=concurrency), on_outcome=lambda o: seen.append(o.job.index)
    )
    assert cell.count("ok") == 40
    assert sorted(seen) == list(range(40))
    assert cell.max_in_flight == concurrency
    assert cell.connects == concurrency
    assert httpx2.get(f"{url}/toy/stats").json()["connections"] == concurrency
    assert all(outcome.result.connect_ns is None for outcome in cell.outcomes)
    # In flight at any time, by the records alone.
    events = sorted(
        event
        for o in cell.outcomes
        for event in ((o.result.sent_ns, 1), (o.result.done_ns or 0, -1))
    )
    level = top = 0
    for _, change in events:
        level += change
        top = max(top, level)
    assert top <= concurrency


def test_one_stream_reads_between_requests(server: ToyThread) -> None:
    """The next request is not sent before the last outcome was handed over."""
    handed: list[int] = []
    cell = run(
        server.use(f"ok,{FAST}"),
        jobs(5),
        Load(),
        on_outcome=lambda _: handed.append(time.monotonic_ns()),
    )
    sent = [outcome.result.sent_ns for outcome in cell.outcomes]
    assert all(before < after for before, after in zip(handed, sent[1:], strict=False))


def test_latency_is_counted_from_the_schedule(server: ToyThread) -> None:
    """L01: one slot of 50 ms under arrivals every 10 ms; waiting belongs to the requests.

    The cap is the client's, so the server looks healthy from the time of sending.
    """
    url = server.use("ok,step_ms=0,prefill_ms=50")
    load = Load(mode="constant", rate_per_s=100, concurrency=1)
    cell = run(url, jobs(10, max_tokens=1), load)
    from_sent = [o.result.chunks[0][0] - o.result.sent_ns for o in cell.outcomes]
    from_schedule = [o.result.chunks[0][0] - o.scheduled_ns for o in cell.outcomes]
    assert statistics.median(from_sent) < 90e6
    assert max(from_schedule) > 9 * 40e6 - 30e6
    assert [o.lag_ns for o in cell.outcomes] == sorted(o.lag_ns for o in cell.outcomes)


def test_arrivals_are_fixed_by_the_seed() -> None:
    load = Load(mode="poisson", rate_per_s=50.0, seed=3)
    times = load.arrivals_ns(4000)
    assert times == load.arrivals_ns(4000)
    assert times != Load(mode="poisson", rate_per_s=50.0, seed=4).arrivals_ns(4000)
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(20e6, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(20e6, rel=0.08)  # exponential: sd = mean
    constant = Load(mode="constant", rate_per_s=8.0).arrivals_ns(5)
    assert constant == [0, 125_000_000, 250_000_000, 375_000_000, 500_000_000]


def test_open_loop_keeps_the_schedule(server: ToyThread) -> None:
    load = Load(mode="poisson", rate_per_s=200.0, seed=1, concurrency=64)
    cell = run(server.use("ok,step_ms=1"), jobs(60), load)
    assert cell.count("ok") == 60
    first = cell.outcomes[0].scheduled_ns
    assert [o.scheduled_ns - first for o in cell.outcomes] == load.arrivals_ns(60)
    assert all(o.lag_ns >= 0 for o in cell.outcomes)


def test_failures_are_counted_exactly(server: ToyThread) -> None:
    """F02: success + failed = scheduled, and the share is that of the server."""
    url = server.use(f"drops,{FAST}")
    cell = run(url, jobs(200), Load(concurrency=8))
    failed = [o for o in cell.outcomes if o.result.status == "failed"]
    assert cell.count("ok") + len(failed) == 200
    assert 5 <= len(failed) <= 35
    assert {o.result.error for o in failed} == {"HTTP 500: planned failure"}


@pytest.mark.parametrize("mode", ["closed", "constant"])
def test_the_time_limit_keeps_what_was_seen(server: ToyThread, mode: str) -> None:
    """F04: requests cut by the end are incomplete, with their events, and nothing is lost."""
    url = server.use("ok,step_ms=20,prefill_ms=0")
    load = Load(mode=mode, concurrency=4, rate_per_s=50.0, time_limit_s=0.5)  # type: ignore[arg-type]
    cell = run(url, jobs(30, max_tokens=1000), load)
    cut = [o for o in cell.outcomes if o.result.status == "incomplete"]
    assert len(cell.outcomes) + cell.unsent == 30
    assert len(cut) == len(cell.outcomes) >= 4
    started = [o for o in cut if o.result.chunks]
    assert len(started) == 4
    for outcome in started:
        assert 5 <= len(outcome.result.token_ids) <= 26
        assert outcome.result.token_source == "ids"
    assert not cell.stopped


def test_stop_ends_what_is_in_flight(server: ToyThread) -> None:
    """Cancelled requests are recorded; the server's slots are free again."""
    url = server.use("ok,step_ms=10")

    async def go() -> CellRun:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.3, stop.set)
        async with StreamClient() as client:
            return await run_cell(client, url, jobs(50, 1000), Load(concurrency=6), stop=stop)

    cell = asyncio.run(go())
    assert cell.stopped
    assert cell.count("cancelled") == 6
    assert cell.unsent == 44
    deadline = time.monotonic() + 5
    while httpx2.get(f"{url}/toy/stats").json()["running"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert httpx2.get(f"{url}/toy/stats").json()["running"] == 0


def test_a_task_that_is_cancelled_leaves_nothing_behind(server: ToyThread) -> None:
    url = server.use("ok,step_ms=10")

    async def go() -> int:
        async with StreamClient() as client:
            task = asyncio.create_task(run_cell(client, url, jobs(8, 1000), Load(concurrency=4)))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.05)
            return len(asyncio.all_tasks())

    assert asyncio.run(go()) == 1


def test_an_outcome_that_cannot_be_stored_ends_the_cell(server: ToyThread) -> None:
    """A full disk must not be followed by an hour of traffic."""

    def refuse(outcome: Outcome) -> None:
        raise OSError(28, "No space left on device")

    for concurrency in (1, 4):
        with pytest.raises(OSError, match="No space left"):
            run(
                server.use("ok,step_ms=10"),
                jobs(40, max_tokens=20),
                Load(concurrency=concurrency),
                on_outcome=refuse,
            )


def test_a_dying_server_fails_its_requests_only() -> None:
    with toy("dies,die_after=5,step_ms=5") as running:
        cell = run(running.base_url, jobs(20), Load(concurrency=2))
        assert running.process.wait(5) == 9
    assert len(cell.outcomes) == 20
    assert 4 <= cell.count("ok") <= 5
    assert cell.count("failed") == 20 - cell.count("ok")
    assert any("cannot connect" in (o.result.error or "") for o in cell.outcomes)


def test_a_load_that_cannot_run_is_refused() -> None:
    for bad in (Load(concurrency=0), Load(concurrency=1025), Load(mode="poisson")):
        with pytest.raises(UsageError):
            bad.check()
    Load(concurrency=1024).check()


@pytest.mark.slow
def test_capacity_of_a_queue_with_a_known_answer() -> None:
    """L08: 4 slots, 10 tokens at 20 ms after 40 ms: a stream gives 10 tokens in 220 ms.

    Inside the steady window the rate does not contain ramp and drain, so it is within 2 %.
    """
    with toy("ok,slots=4,step_ms=20,prefill_ms=40") as running:
        rates = [steady_rate(running.base_url, 96) for _ in range(3)]
    assert statistics.median(rates) == pytest.approx(4 * 10 / 0.220, rel=0.02)


def steady_rate(url: str, count: int) -> float:
    """Tokens/s from the 40th token to the 40th from the end, 8 streams, 10 tokens a request."""
    cell = run(url, jobs(count, max_tokens=10), Load(concurrency=8))
    events = sorted(chunk for o in cell.outcomes for chunk in o.result.chunks)
    begin, end = events[40][0], events[-40][0]
    return sum(n for at, n in events if begin < at <= end) * 1e9 / (end - begin)


@pytest.mark.slow
def test_a_thousand_streams() -> None:
    with toy("ok,step_ms=200,jitter=0.5") as running:
        cell = run(running.base_url, jobs(1500, max_tokens=8), Load(concurrency=1024))
    assert cell.count("ok") == 1500
    assert cell.max_in_flight == 1024
    assert cell.connects == 1024
    assert sum(len(o.result.token_ids) for o in cell.outcomes) == 1500 * 8
