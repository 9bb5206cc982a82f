"""200 clients on 8 slots with every fifth one leaving early, over the real engine.

VK_LOAD_SECONDS sets the length (600 for the nightly run); the figures are printed.
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

import psutil
import pytest
from serving import Running, running, wait_until
from vkengine.digest import checkpoint_folder
from vkengine.load import load_engine
from vkengine.sampling import Draft
from vkengine.tokenizer import Tokenizer

SECONDS = float(os.environ.get("VK_LOAD_SECONDS", "60"))
CLIENTS = 200
SLOTS = 8
KINDS = 12  # distinct requests, so that each answer can be held against the first of its kind


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
            elif tally.answers.setdefault(kind, ids) != ids:
                tally.faults.append(f"kind {kind} gave other tokens")


def _round(server: Running, seconds: float) -> Tally:
    tally = Tally()
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
        _round(server, SECONDS / 6)  # memory that is taken once is taken here
        gc.collect()
        before = process.memory_info().rss
        tally = _round(server, SECONDS)
        gc.collect()
        grown = process.memory_info().rss / before - 1
        waits = sorted(tally.first_token_s)
        print(  # noqa: T201
            f"\n{tally.finished} finished, {tally.left} left early, memory {grown:+.2%}, "
            f"first token p50 {waits[len(waits) // 2]:.2f} s, "
            f"p99 {waits[int(len(waits) * 0.99)]:.2f} s, longest {waits[-1]:.2f} s"
        )
        assert not tally.faults, tally.faults[:5]
        assert tally.left > tally.finished / 20
        assert len(engine._free) == SLOTS
        assert grown < 0.02
        # First come, first served: nobody waits much longer than the queue is deep.
        assert waits[-1] < 4 * waits[len(waits) // 2] + 1.0
