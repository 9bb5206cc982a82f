"""Warm-up ends when times are steady, and says so when they are not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from finalbench.client.http import StreamClient
from finalbench.client.load import Job, Load
from finalbench.client.stream import encode_body
from finalbench.client.warmup import WarmRule, WarmUp, warm_up
from finalbench.testing.launch import ToyThread


@pytest.fixture(scope="module")
def server() -> Iterator[ToyThread]:
    with ToyThread() as running:
        yield running


def warm(url: str, count: int, rule: WarmRule, *, concurrency: int = 1, length: int = 8) -> WarmUp:
    fields = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    jobs = [
        Job(i, encode_body({**fields, "prompt": [i, *[1] * (length - 1)]})) for i in range(count)
    ]

    async def go() -> WarmUp:
        async with StreamClient() as client:
            return await warm_up(client, url, jobs, Load(concurrency=concurrency), rule)

    return asyncio.run(go())


def test_a_steady_server_needs_the_window_only(server: ToyThread) -> None:
    found = warm(
        server.use("ok,step_ms=4,prefill_ms=4"), 20, WarmRule(noise_ms=500.0, token_noise_ms=50.0)
    )
    assert (found.rounds, found.steady, found.reason) == (3, True, None)
    assert len(found.outcomes) == 3


def test_a_warming_server_gets_more(server: ToyThread) -> None:
    """C09: 400, 200, 100, 50, 25, ... ms on top: steady when the last three agree."""
    url = server.use("warming,warm_decay_ms=400,step_ms=2,prefill_ms=2")
    found = warm(url, 20, WarmRule(noise_ms=60.0, token_noise_ms=60.0))
    assert found.steady
    assert found.rounds >= 5
    assert found.first_token_ms[0] > 400 > 200 > found.first_token_ms[-1]


def test_a_slow_first_shape_is_outside_the_window(server: ToyThread) -> None:
    """C07: warm-up has the measured shape, so its compilation falls into it."""
    url = server.use("slow_first_shape,slow_first_ms=150,step_ms=1,prefill_ms=1")
    found = warm(url, 20, WarmRule(noise_ms=100.0, token_noise_ms=50.0))
    assert found.steady and found.rounds >= 4
    assert found.first_token_ms[0] > 150
    assert max(found.first_token_ms[-3:]) < 130


def test_a_drifting_server_never_becomes_steady(server: ToyThread) -> None:
    """C08: the caller is told, with numbers, instead of measuring anyway."""
    url = server.use("drift,drift_per_request=1.0,step_ms=8,prefill_ms=0")
    found = warm(url, 6, WarmRule(noise_ms=4.0))
    assert not found.steady
    assert "still varies from" in (found.reason or "")


def test_a_failure_ends_the_warm_up(server: ToyThread) -> None:
    found = warm(server.use("cut_stream,step_ms=0,cut_after=2"), 6, WarmRule(), concurrency=2)
    assert not found.steady
    assert (found.reason or "").startswith("a warm-up request failed: the connection closed")
    assert len(found.outcomes) == 2
