"""A TCP connection whose reads carry the kernel's time of arrival, not that of the reading.

A client that shares its cores waits for them, often for milliseconds; what arrives meanwhile would
be stamped when it gets its turn. Linux stamps each segment as it comes in (SO_TIMESTAMPNS, by the
wall clock); how long the data then lay is taken off the monotonic time of the read.

Source: socket(7), SO_TIMESTAMP and SO_TIMESTAMPNS.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Protocol

_NS = 1_000_000_000
_TIMESTAMPNS = 35  # SO_TIMESTAMPNS of asm-generic/socket.h, which is also the message's type
_TIMESPEC = struct.Struct("@ll")
_ANCILLARY = socket.CMSG_SPACE(_TIMESPEC.size)
_READ_BYTES = 65_536
# Data that lay longer was not read by a client that works; a step of the wall clock looks so.
_MAX_WAIT_NS = 10 * _NS


class Receiver(Protocol):
    """What a connection does with what comes in."""

    def received(self, data: bytes, at_ns: int, /) -> None: ...

    def connection_lost(self, exc: Exception | None, /) -> None: ...


def stamped(sock: socket.socket) -> bool:
    """Asks the kernel to stamp what this socket receives; False where it cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, _TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


def waited_ns(ancillary: list[tuple[int, int, bytes]], wall_ns: int) -> int:
    """How long data had lain when the wall clock was `wall_ns`; 0 without a sane stamp."""
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == _TIMESTAMPNS:
            seconds, rest = _TIMESPEC.unpack(payload[: _TIMESPEC.size])
            waited = wall_ns - seconds * _NS - rest
            return waited if 0 <= waited <= _MAX_WAIT_NS else 0
    return 0


class ArrivalTransport:
    """Reads and writes one connected socket in the running event loop.

    The part of `asyncio.Transport` that a connection uses: `write`, `is_closing`, `abort`. A clock
    of the caller's own is read at each read, and nothing is taken off it.
    """

    def __init__(
        self, sock: socket.socket, receiver: Receiver, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._sock, self._receiver, self._clock = sock, receiver, clock
        self._loop = asyncio.get_running_loop()
        self._unsent = b""
        self._closing = False
        self._kernel = clock is time.monotonic_ns
        self._latest_ns = 0
        self._loop.add_reader(sock.fileno(), self._readable)

    def write(self, data: bytes) -> None:
        """All of it, now or as soon as the socket takes more."""
        if self._closing:
            return
        if self._unsent:
            self._unsent += data
            return
        self._unsent = self._send(data)
        if self._unsent and not self._closing:
            self._loop.add_writer(self._sock.fileno(), self._writable)

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        self._lose(None)

    def _send(self, data: bytes) -> bytes:
        try:
            return data[self._sock.send(data) :]
        except (BlockingIOError, InterruptedError):
            return data
        except OSError as error:
            self._lose(error)
            return b""

    def _writable(self) -> None:
        self._unsent = self._send(self._unsent)
        if not self._unsent and not self._closing:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(_READ_BYTES, _ANCILLARY)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(error)
            return
        waited = waited_ns(ancillary, time.time_ns()) if self._kernel else 0
        if not data:
            self._lose(None)
            return
        # Never before what was read earlier: clocks are compared here, and one of them may step.
        self._latest_ns = max(self._latest_ns, self._clock() - waited)
        self._receiver.received(data, self._latest_ns)

    def _lose(self, error: Exception | None) -> None:
        if self._closing:
            return
        self._closing = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._loop.call_soon(self._receiver.connection_lost, error)


async def connect(host: str, port: int) -> socket.socket:
    """A connected, stamped, non-blocking socket to the first address that answers. OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failed: OSError | None = None
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
        except OSError as error:
            failed = failed or error
            sock.close()
            continue
        except BaseException:
            sock.close()
            raise
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stamped(sock)
        return sock
    raise failed or OSError(f"no address of {host}")
