"""200 clients on 8 slots with every fifth one leaving early, over the real engine.

VK_LOAD_SECONDS sets the length (60 unless given; 600 for the figures in docs/exactness.md). Run
with `-s`, the test prints its figures.
"""

from __future__ import annotations

import gc
import http.client
import json
import os
import random
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise

import psutil
import pytest
from serving import Running, running, wait_until
from vkengine.digest import checkpoint_folder
from vkengine.load import load_engine
from vkengine.sampling import Draft
from vkengine.server.driver import Driver, Job
from vkengine.tokenizer import Tokenizer

SECONDS = float(os.environ.get("VK_LOAD_SECONDS", "60"))
CLIENTS = 200
SLOTS = 8
KINDS = 12  # distinct requests, so that each answer can be held against the first of its kind


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


@dataclass
class Tally:
    answers: dict[int, list[int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    finished: int = 0
    left: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def _body(kind: int) -> bytes:
    return json.dumps(
        {
            "prompt": [(kind * 31 + i * 7) % 4000 + 1 for i in range(3 + kind * 5)],
            "max_tokens": 8 + kind,
            "temperature": 0.8 if kind % 2 else 0.0,
            "seed": kind,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


def _client(server: Running, number: int, until_s: float, tally: Tally) -> None:
    rng = random.Random(number)
    while time.monotonic() < until_s:
        kind, leaves = rng.randrange(KINDS), rng.random() < 0.2
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        began = time.monotonic()
        connection.request("POST", "/v1/completions", _body(kind))
        if leaves and rng.random() < 0.5:
            time.sleep(rng.random() * 0.2)
            connection.close()
            with tally.lock:
                tally.left += 1
            continue
        response = connection.getresponse()
        ids: list[int] = []
        usage, first_s = None, None
        while (line := response.readline()) and line != b"data: [DONE]\n":
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage", usage)
            for choice in event.get("choices", []):
                ids += choice["token_ids"]
                first_s = first_s or time.monotonic() - began
            if leaves and len(ids) > 3:
                break
        connection.close()
        with tally.lock:
            if leaves:
                tally.left += 1
                continue
            tally.finished += 1
            tally.first_token_s.append(first_s or 0.0)
            if response.status != 200 or usage is None or usage["completion_tokens"] != len(ids):
                tally.faults.append(f"{response.status} {usage} {len(ids)}")
            elif tally.answers[kind] != ids:
                tally.faults.append(f"kind {kind} gave other tokens")


def _alone(server: Running, kind: int) -> list[int]:
    """What a kind of request gives when nobody else asks: no token lost, none twice."""
    reply = server.send("POST", "/v1/completions", _body(kind))
    ids = [i for choice in reply.chunks for i in choice["token_ids"]]
    assert len(ids) == 8 + kind
    return ids


def _round(server: Running, seconds: float, answers: dict[int, list[int]]) -> Tally:
    tally = Tally(answers)
    until_s = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_client, args=(server, n, until_s, tally)) for n in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
