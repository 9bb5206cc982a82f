"""Container and process runtime measure the same: paired blocks of the real engine on vk-tiny.

On a quiet machine of two cores it takes less than eight minutes:

    python -m pytest -m nightly -s tests/e2e/test_container_speed.py

A block is a fresh server of each kind, both alive, each idle while the other is asked. Requests go
to them in random order within pairs, so a slow second of the machine strikes both alike.
FINALBENCH_AGREE_BLOCKS sets another number of blocks; after eight minutes no further one begins,
whatever the figures are.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psutil
import pytest
from own_daemon import Daemon

from finalbench.arms import server_settings
from finalbench.client.http import StreamClient
from finalbench.client.stream import StreamResult, complete, encode_body
from finalbench.client.workload import (
    Prompt,
    PromptSpec,
    ServerTokenizer,
    build_prompts,
    request_body,
)
from finalbench.prompts import DOMAINS
from finalbench.runtime.container import ContainerRuntime
from finalbench.runtime.server import LiveServer, Wanted, our_environment, start_server
from finalbench.scenario import DraftSetting, Scenario, load_scenario
from finalbench.stats import Verdict, paired

pytestmark = [pytest.mark.container, pytest.mark.nightly, pytest.mark.timeout(1200)]

BLOCKS = int(os.environ.get("FINALBENCH_AGREE_BLOCKS", "30"))
LEAST_BLOCKS, LAST_START_S = 8, 450
REQUESTS, WARM, PROMPT_TOKENS, OUTPUT_TOKENS, MARGIN = 20, 3, 128, 64, 0.05
KINDS = ("container", "process")


class Pair:
    """A server of each kind, started together."""

    def __init__(self, runtime: ContainerRuntime, scenario: Scenario, folder: Path) -> None:
        settings = server_settings("vk", scenario)
        environment = our_environment()
        self.cpu: dict[str, float] = {}
        self.servers: dict[str, LiveServer] = {}
        with ThreadPoolExecutor(1) as pool:
            wanted = Wanted("vk", "agree", folder / "container.log", 180)
            inside = pool.submit(runtime.start, settings, wanted)
            try:
                # From this thread: a child dies with the thread that started it.
                self.servers["process"] = start_server(
                    settings, log=folder / "process.log", timeout_s=180, environment=environment
                )
            finally:
                self.servers["container"] = inside.result()

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far; a container's first process is its init."""
        found = {}
        for kind, server in self.servers.items():
            first = psutil.Process(server.pid)
            times = [p.cpu_times() for p in (first, *first.children(recursive=True))]
            found[kind] = sum(t.user + t.system for t in times)
        return found

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()


def prompts(server: LiveServer, scenario: Scenario) -> list[Prompt]:
    spec = PromptSpec(
        length=PROMPT_TOKENS,
        count=WARM + REQUESTS,
        group="agree",
        seed=1,
        text_class="natural",
        domains=scenario.workload.domains or tuple(DOMAINS),
        purpose="measure",
    )
    with httpx2.Client(timeout=60, trust_env=False) as http:
        return list(build_prompts(spec, ServerTokenizer(http, server.base_url, server.model_id)))


def rate(results: Sequence[StreamResult]) -> float:
    """Decode tok/s over requests: what follows the first chunk, and the time it took."""
    tokens = sum(len(r.token_ids) - r.first_chunk_tokens for r in results)
    return tokens * 1e9 / sum(r.chunks[-1][0] - r.chunks[0][0] for r in results)


async def block(
    pair: Pair, asked: Sequence[Prompt], scenario: Scenario, draw: random.Random
) -> dict[str, list[StreamResult]]:
    kept: dict[str, list[StreamResult]] = {kind: [] for kind in KINDS}
    before = pair.cpu_seconds()
    async with StreamClient() as client:
        for number, prompt in enumerate(asked):
            if number == WARM:
                before = pair.cpu_seconds()
            for kind in draw.sample(KINDS, 2):
                body = request_body(
                    prompt,
                    model=pair.servers[kind].model_id,
                    output_len=OUTPUT_TOKENS,
                    sampling=scenario.samplings["greedy"],
                    draft=DraftSetting(method="mtp", k=3),
                    seed=1,
                    ignore_eos=True,
                )
                result = await complete(client, pair.servers[kind].base_url, encode_body(body))
                assert result.status == "ok", result.error
                if number >= WARM:
                    kept[kind].append(result)
    after = pair.cpu_seconds()
    pair.cpu = {kind: after[kind] - before[kind] for kind in KINDS}
    return kept


def test_container_and_process_agree(
    engine: Daemon, environment: dict[str, str], tmp_path: Path
) -> None:
    scenario, draw = load_scenario("vk-tiny", []), random.Random(7)
    runtime = ContainerRuntime.open(environment)
    runtime.prepare(["vk"], lambda line: None)
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    work: dict[str, list[float]] = {kind: [] for kind in KINDS}
    end = time.monotonic() + LAST_START_S
    for number in range(BLOCKS):
        if number >= LEAST_BLOCKS and time.monotonic() > end:
            break
        folder = tmp_path / str(number)
        folder.mkdir()
        pair = Pair(runtime, scenario, folder)
        try:
            asked = prompts(pair.servers["process"], scenario)
            found = asyncio.run(block(pair, asked, scenario, draw))
        finally:
            pair.stop()
        tokens = [[r.token_ids for r in found[kind]] for kind in KINDS]
        assert tokens[0] == tokens[1]  # the same work
        for kind in KINDS:
            rates[kind].append(rate(found[kind]))
            work[kind].append(pair.cpu[kind])
        print(  # noqa: T201
            f"block {number}: "
            + ", ".join(
                f"{kind} {rates[kind][-1]:.1f} tok/s ({work[kind][-1]:.2f} s of CPU)"
                for kind in KINDS
            ),
            flush=True,
        )
    result = paired(rates["container"], rates["process"], margin=MARGIN)
    cost = paired(work["container"], work["process"], margin=MARGIN)
    shown = (
        f"container / process over {result.n} blocks: decode rate {result.ratio:.4f} "
        f"[{result.low:.4f}, {result.high:.4f}], {result.verdict}; "
        f"CPU time {cost.ratio:.4f} [{cost.low:.4f}, {cost.high:.4f}]"
    )
    print(shown)  # noqa: T201
    assert result.verdict is Verdict.EQUIVALENT, shown
