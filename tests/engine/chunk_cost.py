"""What a streamed chunk costs the server above a bare event loop that sends as many bytes.

Both run on the server's own loop in the same process, turn by turn at the same pace, each woken by
a thread and each read by a process of its own. CPU time of the loop and of the waking thread is
counted; the engine's step, which waits for its pace in there, is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine
from serving import Running, running, wait_until
from tiny import TEXT, write_tokenizer
from vkengine.output import Output
from vkengine.tokenizer import Tokenizer

MANY = 1_000_000
#: A completion chunk with one id, and the frame around it.
PAYLOAD = b"x" * 260
_READER = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as client:
    client.sendall(bytes.fromhex(sys.argv[2]))
    while client.recv(65536):
        pass
"""


@dataclass
class PacedEngine(FakeEngine):
    """Steps when told to."""

    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    stepping_s: float = 0.0  # CPU time spent in here

    def step(self) -> list[Output]:
        before = time.thread_time()
        self.gate.acquire()
        try:
            return super().step()
        finally:
            self.stepping_s += time.thread_time() - before


class _Bare(asyncio.Protocol):
    """Somebody to send to."""

    transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport


class _Waker:
    """In the engine's place: has the loop send a payload whenever it is told to."""

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: _Bare) -> None:
        self.gate = threading.Semaphore(0)
        self.stepping_s = 0.0
        self.stopped = False
        self._loop = loop
        self._write: Callable[[bytes], None] = protocol.transport.write
        self.thread = threading.Thread(target=self._run, name="bare-waker")

    def _run(self) -> None:
        while True:
            before = time.thread_time()
            self.gate.acquire()
            self.stepping_s += time.thread_time() - before
            if self.stopped:
                return
            self._loop.call_soon_threadsafe(self._write, PAYLOAD)


@dataclass(frozen=True)
class Pair:
    """Microseconds of CPU a chunk, one after the other."""

    bare_us: float
    ours_us: float

    @property
    def added_us(self) -> float:
        return self.ours_us - self.bare_us


def cpu_s(name: str) -> float:
    """CPU time so far of the one thread with this name."""
    (ident,) = [t.ident for t in threading.enumerate() if t.name == name]
    assert ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


def measure(folder: Path, *, pace_s: float, chunks: int, pairs: int) -> list[Pair]:
    """`pairs` times `chunks` of each; `folder` takes a tokenizer."""
    write_tokenizer(folder)
    tokenizer = Tokenizer(folder)
    engine = PacedEngine(max_model_len=MANY, script=tokenizer.encode(TEXT))
    with running(engine, tokenizer) as server, _bare(server) as waker, _stream(server):

        def cost_us(source: Any, thread: str, count: int) -> float:
            def spent_s() -> float:
                return cpu_s("test-server") + cpu_s(thread) - source.stepping_s

            before = spent_s()
            for _ in range(count):
                source.gate.release()
                time.sleep(pace_s)
            return (spent_s() - before) / count * 1e6

        def bare(count: int) -> float:
            return cost_us(waker, "bare-waker", count)

        def ours(count: int) -> float:
            return cost_us(engine, "vk-engine", count)

        bare(10), ours(10)
        found = []
        for turn in range(pairs):
            if turn % 2:
                first = ours(chunks)
                found.append(Pair(bare(chunks), first))
            else:
                found.append(Pair(bare(chunks), ours(chunks)))
        return found


def added_us(pairs: list[Pair]) -> float:
    return statistics.median(pair.added_us for pair in pairs)


def bare_us(pairs: list[Pair]) -> float:
    return statistics.median(pair.bare_us for pair in pairs)


@contextlib.contextmanager
def _bare(server: Running) -> Iterator[_Waker]:
    loop, protocol = server.driver._loop, _Bare()

    async def listen() -> asyncio.Server:
        return await loop.create_server(lambda: protocol, "127.0.0.1", 0)

    async def close(listening: asyncio.Server) -> None:
        listening.close()
        protocol.transport.close()

    listening = asyncio.run_coroutine_threadsafe(listen(), loop).result(10)
    with _reader(listening.sockets[0].getsockname()[1], b"-"):
        wait_until(lambda: protocol.transport is not None)
        waker = _Waker(loop, protocol)
        waker.thread.start()
        try:
            yield waker
        finally:
            waker.stopped = True
            waker.gate.release()
            waker.thread.join()
            asyncio.run_coroutine_threadsafe(close(listening), loop).result(10)


@contextlib.contextmanager
def _stream(server: Running) -> Iterator[None]:
    body = {"prompt": [5], "ignore_eos": True, "max_tokens": MANY - 10, "stream": True}
    raw = json.dumps({**body, "return_token_ids": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"

    def gone() -> bool:
        server.engine.gate.release()
        return server.idle()

    with _reader(server.port, head.encode() + raw):
        wait_until(lambda: bool(server.driver.running))
        yield
    wait_until(gone)


@contextlib.contextmanager
def _reader(port: int, request: bytes) -> Iterator[None]:
    """A process, so that reading takes neither our lock nor our CPU time."""
    command = [sys.executable, "-c", _READER, str(port), request.hex()]
    with subprocess.Popen(command) as process:
        try:
            yield
        finally:
            process.terminate()


def main() -> int:
    """`PYTHONPATH=tests/engine python -m chunk_cost` prints the table of docs/exactness.md."""
    import tempfile

    for pace_ms, chunks, pairs in ((0.5, 400, 20), (2.0, 150, 20), (14.0, 40, 20)):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), pace_s=pace_ms / 1e3, chunks=chunks, pairs=pairs)
        bare = bare_us(found)
        ours = statistics.median(p.ours_us for p in found)
        low, _, high = statistics.quantiles((p.added_us for p in found), n=4)
        sys.stdout.write(
            f"| {pace_ms} ms | {bare:.0f} | {ours:.0f} | {added_us(found):.0f} "
            f"({low:.0f} to {high:.0f}) |\n"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
