"""Time stamps of arrival: right even when the client is late to read; and its turn on a core."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Generator

import pytest

from finalbench.client import turn
from finalbench.client.arrival import ArrivalTransport, connect, stamped, waited_ns
from finalbench.client.connection import Connection, Transfer

MS = 1_000_000
BUSY_S = 0.08


class Noted:
    """Receives, and remembers."""

    def __init__(self) -> None:
        self.reads: list[tuple[bytes, int]] = []
        self.lost: list[Exception | None] = []
        self.more = asyncio.Event()

    def received(self, data: bytes, at_ns: int, /) -> None:
        self.reads.append((data, at_ns))
        self.more.set()

    def connection_lost(self, exc: Exception | None, /) -> None:
        self.lost.append(exc)
        self.more.set()


@pytest.fixture
def listener() -> Generator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Our end, stamped, and the server's."""
    port = listener.getsockname()[1]
    ours = asyncio.run(connect("127.0.0.1", port))
    theirs, _ = listener.accept()
    return ours, theirs


def kernel_stamps() -> bool:
    with socket.socket() as sock:
        return stamped(sock)


@pytest.mark.skipif(not kernel_stamps(), reason="needs Linux")
def test_what_came_while_the_client_was_busy_has_the_time_it_came(listener: socket.socket) -> None:
    ours, theirs = pair(listener)
    written: list[int] = []

    def write() -> None:
        time.sleep(BUSY_S / 4)
        written.append(time.monotonic_ns())
        theirs.send(b"x")

    async def go(clock_is_ours: bool) -> int:
        noted = Noted()
        clock = (lambda: time.monotonic_ns()) if clock_is_ours else time.monotonic_ns
        transport = ArrivalTransport(ours.dup(), noted, clock)
        writer = threading.Thread(target=write)
        writer.start()
        time.sleep(BUSY_S)  # the loop is held up, as by other work
        await noted.more.wait()
        writer.join()
        transport.abort()
        return noted.reads[0][1] - written.pop()

    with ours, theirs:
        late = asyncio.run(go(False))
        assert -MS < late < 20 * MS
        # A clock of the caller's own has only the time of the read.
        assert asyncio.run(go(True)) > BUSY_S * 1e9 / 2


def test_how_long_data_lay_is_read_from_a_sane_stamp_only() -> None:
    def stamp(at_ns: int, kind: int = 35, level: int = socket.SOL_SOCKET) -> list:
        return [(level, kind, struct.pack("@ll", *divmod(at_ns, 10**9)))]

    now = 1_700_000_000_123_456_789
    assert waited_ns(stamp(now - 7), now) == 7
    assert waited_ns(stamp(now - 5 * 10**9), now) == 5 * 10**9
    assert waited_ns(stamp(now), now) == 0
    assert waited_ns([], now) == 0
    assert waited_ns(stamp(now - 7, kind=36), now) == 0
    assert waited_ns(stamp(now - 7, level=6), now) == 0
    # L17: a wall clock that was set back or forward in between tells nothing.
    assert waited_ns(stamp(now + 5 * 10**9), now) == 0
    assert waited_ns(stamp(now - 11 * 10**9), now) == 0


def test_stamps_never_go_back(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock set forward between two reads makes data look older than it is."""
    ours, theirs = pair(listener)
    wall = time.time_ns
    ahead = [0, 3 * 10**9]
    monkeypatch.setattr(time, "time_ns", lambda: wall() + ahead.pop(0))

    async def go() -> list[int]:
        noted = Noted()
        transport = ArrivalTransport(ours, noted)
        for _ in range(2):
            noted.more.clear()
            theirs.send(b"x")
            await noted.more.wait()
        transport.abort()
        return [at for _, at in noted.reads]

    with theirs:
        first, second = asyncio.run(go())
    assert second >= first


def test_a_request_larger_than_the_sockets_buffers_is_written_whole(
    listener: socket.socket,
) -> None:
    ours, theirs = pair(listener)
    size = 8_000_000

    async def go() -> bytes:
        transport = ArrivalTransport(ours, Noted())
        transport.write(b"a" * size)
        transport.write(b"end")
        loop, got = asyncio.get_running_loop(), bytearray()
        theirs.setblocking(False)
        while len(got) < size + 3:
            got += await loop.sock_recv(theirs, 1 << 20)
        transport.abort()
        transport.abort()
        assert transport.is_closing()
        transport.write(b"too late")
        return bytes(got)

    with theirs:
        got = asyncio.run(go())
    assert got == b"a" * size + b"end"


@pytest.mark.parametrize("reset", [False, True])
def test_the_other_side_going_away_ends_the_exchange(listener: socket.socket, reset: bool) -> None:
    ours, theirs = pair(listener)

    async def go() -> Transfer:
        connection, transfer = Connection(time.monotonic_ns), Transfer()
        connection.transport = ArrivalTransport(ours, connection)
        finished = connection.start(b"POST / HTTP/1.1\r\n\r\n", transfer)
        await asyncio.sleep(0.01)
        if reset:  # unread bytes and no time to linger: the kernel sends a reset
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        await asyncio.wait_for(finished, 5)
        assert not connection.open
        return transfer

    assert asyncio.run(go()).error == "the connection closed before a response"


def test_nobody_listening_is_an_error_by_its_name(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(connect("127.0.0.1", port))


def test_the_client_is_first_in_line_only_while_it_measures() -> None:
    before = os.sched_getscheduler(0)
    with turn.first_in_line() as scheduling:
        inside = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
        assert inside == (os.SCHED_RR if scheduling == "real-time" else before)
        with turn.first_in_line() as again:
            assert again == scheduling
        code = "import os; print(os.sched_getscheduler(0))"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert int(child.stdout) == os.SCHED_OTHER
    assert os.sched_getscheduler(0) == before


def test_without_the_right_the_client_goes_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    with turn.first_in_line() as scheduling:
        assert scheduling == "shared"
    monkeypatch.delattr(os, "sched_getscheduler")  # as on another system
    with turn.first_in_line() as scheduling:
        assert scheduling == "shared"


def test_the_wait_for_a_core_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if turn._SCHEDSTAT.exists():
        before = turn.waited_ns()
        assert before is not None and before >= 0
    monkeypatch.setattr(turn, "_SCHEDSTAT", turn.Path("/nowhere"))
    assert turn.waited_ns() is None
