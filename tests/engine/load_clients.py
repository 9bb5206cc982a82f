"""Clients of the load test, in a process of their own: their memory is not the server's."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field

CLIENTS = 200
KINDS = 12  # distinct requests, so that each answer can be held against the first of its kind
LOCK = threading.Lock()


@dataclass
class Tally:
    faults: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    finished: int = 0
    left: int = 0


def body(kind: int) -> bytes:
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


def run(port: int, seconds: float, answers: dict[int, list[int]]) -> Tally:
    """Every client asks, reads and asks again until the time is over; `answers` by kind."""
    tally = Tally()
    until_s = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_client, args=(port, n, until_s, answers, tally))
        for n in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


def _client(
    port: int, number: int, until_s: float, answers: dict[int, list[int]], tally: Tally
) -> None:
    rng = random.Random(number)
    while time.monotonic() < until_s:
        kind, leaves = rng.randrange(KINDS), rng.random() < 0.2
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        began = time.monotonic()
        connection.request("POST", "/v1/completions", body(kind))
        if leaves and rng.random() < 0.5:
            time.sleep(rng.random() * 0.2)
            connection.close()
            with LOCK:
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
        with LOCK:
            if leaves:
                tally.left += 1
                continue
            tally.finished += 1
            tally.first_token_s.append(first_s or 0.0)
            if response.status != 200 or usage is None or usage["completion_tokens"] != len(ids):
                tally.faults.append(f"{response.status} {usage} {len(ids)}")
            elif answers[kind] != ids:
                tally.faults.append(f"kind {kind} gave other tokens")
