"""What the server itself costs, in CPU time of its threads, which a busy machine blurs least."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from fake_engine import FakeEngine
from serving import running
from tiny import write_tokenizer
from vkengine.stock_model import load_stock
from vkengine.tokenizer import Tokenizer

CHUNKS = 4000


def _cpu_s(name: str) -> float:
    """CPU time so far of the one thread with this name."""
    (ident,) = [t.ident for t in threading.enumerate() if t.name == name]
    assert ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


def test_a_chunk_costs_under_fifty_microseconds(tmp_path: Path) -> None:
    """From the engine's output to the socket, when chunks come as fast as they go."""
    write_tokenizer(tmp_path)
    engine = FakeEngine(max_model_len=CHUNKS + 10, step_s=0.00002)
    with running(engine, Tokenizer(tmp_path)) as server:
        body = {"prompt": [5], "ignore_eos": True, "stream": True, "return_token_ids": True}
        server.complete(**body, max_tokens=200)
        costs_us = []
        for _ in range(3):
            before = _cpu_s("test-server")
            reply = server.complete(**body, max_tokens=CHUNKS)
            costs_us.append((_cpu_s("test-server") - before) / CHUNKS * 1e6)
            assert len(reply.chunks) == CHUNKS
        assert min(costs_us) < 50, costs_us


def test_the_server_takes_under_five_percent_of_stock() -> None:
    """The server's two threads beside `generate`'s: even one after the other, stock keeps 95 %."""
    engine = load_stock("vk-tiny", device="cpu", threads=1)
    with running(engine) as server:
        body = {"temperature": 0.0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        server.complete(**body, prompt=[611, 1390], max_tokens=10)
        names = ("test-server", "vk-engine", "stock-generate")
        shares = []
        for start in (5, 50):
            before = [_cpu_s(name) for name in names]
            server.complete(**body, prompt=list(range(start, start + 16)), max_tokens=80)
            loop, driver, generate = (_cpu_s(n) - b for n, b in zip(names, before, strict=True))
            shares.append((loop + driver) / generate)
        assert min(shares) < 0.05, shares
