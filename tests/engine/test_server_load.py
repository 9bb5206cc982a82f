"""200 clients on 8 slots with every fifth one leaving early, over the real engine.

VK_LOAD_SECONDS sets the length (60 unless given; 600 for the figures in docs/exactness.md). Run
with `-s`, the test prints its figures.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import load_clients
import psutil
import pytest
from load_clients import KINDS, Tally
from serving import Running, running, wait_until
from vkengine.digest import checkpoint_folder
from vkengine.load import load_engine
from vkengine.sampling import Draft
from vkengine.server.driver import Driver, Job
from vkengine.tokenizer import Tokenizer

SECONDS = float(os.environ.get("VK_LOAD_SECONDS", "60"))
SLOTS = 8


@dataclass
class Queue:
    """Who came and who was let in, in order; kept by wrapping two methods of the driver."""

    came: list[str] = field(default_factory=list)
    let_in: list[str] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)

    def watch(self, driver: Driver) -> None:
        submit, take = driver.submit, driver._take

        def submitted(jobs: list[Job]) -> None:
            submit(jobs)
            self.came += [job.request_id for job in jobs]

        def taken(job: Job) -> None:
            take(job)
            if job.admitted_s is not None:
                self.let_in.append(job.request_id)
                self.waited_s.append(job.admitted_s - job.queued_s)

        driver.submit, driver._take = submitted, taken  # type: ignore[method-assign]

    def out_of_turn(self) -> int:
        """Requests let in before one that came earlier and was let in too."""
        place = {name: n for n, name in enumerate(self.came)}
        turns = [place[name] for name in self.let_in]
        return sum(b < a for a, b in pairwise(turns))


def _alone(server: Running, kind: int) -> list[int]:
    """What a kind of request gives when nobody else asks: no token lost, none twice."""
    reply = server.send("POST", "/v1/completions", load_clients.body(kind))
    ids = [i for choice in reply.chunks for i in choice["token_ids"]]
    assert len(ids) == 8 + kind
    return ids


def _round(server: Running, seconds: float, answers: dict[int, list[int]]) -> Tally:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients:
        tally = clients.submit(load_clients.run, server.port, seconds, answers).result()
    wait_until(server.idle, 60)
    return tally


class Memory(threading.Thread):
    """The resident set, every two seconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes: list[int] = []
        self._end = threading.Event()

    def run(self) -> None:
        process = psutil.Process()
        while not self._end.wait(2.0):
            self.bytes.append(process.memory_info().rss)

    def stop(self) -> None:
        self._end.set()
        self.join()


def _at(values: list[float], share: float) -> float:
    return sorted(values)[int((len(values) - 1) * share)]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
def test_many_clients_for_long() -> None:
    folder = checkpoint_folder("vk-tiny")
    assert folder is not None
    engine = load_engine(
        "vk-tiny", device="cpu", threads=1, max_sequences=SLOTS, default_draft=Draft("mtp", 3)
    )
    process = psutil.Process()
    with running(engine, Tokenizer(folder)) as server:
        answers = {kind: _alone(server, kind) for kind in range(KINDS)}
        _round(server, max(20.0, SECONDS / 12), answers)  # what is taken once is taken here
        queue = Queue()
        queue.watch(server.driver)
        gc.collect()
        before = process.memory_info().rss
        memory = Memory()
        memory.start()
        tally = _round(server, SECONDS, answers)
        memory.stop()
        gc.collect()
        grown = process.memory_info().rss / before - 1
        third = len(memory.bytes) // 3
        drift = sum(memory.bytes[-third:]) / sum(memory.bytes[:third]) - 1
        waits, admission = tally.first_token_s, queue.waited_s
        print(  # noqa: T201
            f"\n{tally.finished} finished, {tally.left} left early\n"
            f"memory {before / 2**20:.0f} MiB, at the end {grown:+.2%}, "
            f"last third over first third {drift:+.2%}\n"
            f"admission p50 {_at(admission, 0.5):.2f} s, p99 {_at(admission, 0.99):.2f} s, "
            f"longest {max(admission):.2f} s; "
            f"out of turn {queue.out_of_turn()} of {len(admission)}\n"
            f"first token p50 {_at(waits, 0.5):.2f} s, p99 {_at(waits, 0.99):.2f} s"
        )
        assert not tally.faults, tally.faults[:5]
        assert tally.left > tally.finished / 20
        assert len(engine._free) == SLOTS
        assert grown < 0.02
        assert drift < 0.02
        # First come, first served, and nobody waits much longer than the queue is deep.
        assert queue.out_of_turn() == 0
        assert max(admission) < 4 * _at(admission, 0.5) + 1.0
