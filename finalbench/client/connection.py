"""One HTTP/1.1 connection for timed streams: time stamps of arrival, no decoding.

A response is kept as raw pieces with one stamp each; `stream.interpret` reads them afterwards.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from finalbench.client.sse import Dechunker, FramingError

Clock = Callable[[], int]
_MAX_HEAD = 65536


@dataclass(slots=True)
class Transfer:
    """One exchange as it came off the wire. Times in ns of the client's clock.

    `connect_ns` is how long opening the connection took, None on a pooled one. `stamps[i]` says
    when the last byte of `pieces[i]` arrived, the body bytes of one socket read. `error` says why
    the exchange broke off; `cut` is the status the harness gave it when it ended it itself.
    """

    sent_ns: int = 0
    connect_ns: int | None = None
    done_ns: int | None = None
    http_status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    stamps: array[int] = field(default_factory=lambda: array("q"))
    pieces: list[bytes] = field(default_factory=list)
    error: str | None = None
    cut: str | None = None

    def body(self) -> bytes:
        return b"".join(self.pieces)


class Wire(Protocol):
    """What is written to; asyncio's transports, or one that stamps by the kernel's clock."""

    def write(self, data: bytes, /) -> None: ...

    def is_closing(self) -> bool: ...

    def abort(self) -> None: ...


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.transport: Wire | None = None
        self.transfer: Transfer | None = None
        self.finished: asyncio.Future[None] | None = None
        self.reusable = True
        self.exchanges = 0
        self._head = b""
        self._in_body = False
        self._dechunker: Dechunker | None = None
        self._decoded = 0  # pieces whose chunked coding is removed
        self._length: int | None = None  # None: until the connection closes

    @property
    def open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def start(self, request: bytes, transfer: Transfer) -> asyncio.Future[None]:
        """Writes the request; the future resolves when the response is complete or broken."""
        assert self.transport is not None
        self.transfer = transfer
        self.finished = asyncio.get_running_loop().create_future()
        self.exchanges += 1
        self._head, self._in_body, self._decoded = b"", False, 0
        self._dechunker, self._length = None, None
        transfer.sent_ns = self.clock()
        self.transport.write(request)
        return self.finished

    def data_received(self, data: bytes) -> None:
        """From asyncio, which knows no time but that of its reading."""
        self.received(data, self.clock())

    def received(self, data: bytes, now: int) -> None:
        """What one read gave, and when it arrived."""
        transfer = self.transfer
        if transfer is None:
            self.reusable = False
            self.close()
            return
        if self._in_body:
            transfer.stamps.append(now)
            transfer.pieces.append(data)
            if self._dechunker is not None:
                # The end of a chunked response always ends a read here; anything else is left
                # coded until the stream is over.
                if data.endswith(b"\r\n\r\n") or len(data) < 4:
                    self._decode()
            elif self._length is not None:
                self._length -= len(data)
                self._check_length()
            return
        self._read_head(data, now)

    def _read_head(self, data: bytes, now: int) -> None:
        transfer = self.transfer
        assert transfer is not None
        self._head += data
        head, separator, body = self._head.partition(b"\r\n\r\n")
        if not separator:
            if len(self._head) > _MAX_HEAD:
                self._finish("the response head is too long")
            return
        self._in_body = True
        lines = head.decode("latin-1").split("\r\n")
        parts = lines[0].split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
            self._finish(f"not an HTTP response: {lines[0][:60]!r}")
            return
        status = int(parts[1])
        if 100 <= status < 200:
            self._in_body, self._head = False, b""
            if body:
                self._read_head(body, now)
            return
        transfer.http_status = status
        for line in lines[1:]:
            name, _, value = line.partition(":")
            transfer.headers[name.strip().lower()] = value.strip()
        headers = transfer.headers
        if parts[0] == "HTTP/1.0" or headers.get("connection", "").lower() == "close":
            self.reusable = False
        if body:
            transfer.stamps.append(now)
            transfer.pieces.append(body)
        if headers.get("transfer-encoding", "").lower() == "chunked":
            self._dechunker = Dechunker()
            self._decode()
        elif "content-length" in headers and headers["content-length"].isdigit():
            self._length = int(headers["content-length"]) - len(body)
            self._check_length()
        else:
            self.reusable = False

    def _decode(self) -> None:
        transfer, dechunker = self.transfer, self._dechunker
        if transfer is None or dechunker is None:
            return
        pieces = transfer.pieces
        try:
            for index in range(self._decoded, len(pieces)):
                pieces[index] = dechunker.feed(pieces[index])
                self._decoded = index + 1
        except FramingError as error:
            del pieces[self._decoded :], transfer.stamps[self._decoded :]
            self._finish(str(error))
            return
        if dechunker.done:
            self._finish(None)

    def _check_length(self) -> None:
        if self._length is not None and self._length <= 0:
            self._finish("more bytes than content-length says" if self._length < 0 else None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        transfer = self.transfer
        if transfer is None:
            return
        self._decode()
        if self.transfer is None:
            return
        by_close = self._in_body and self._dechunker is None and self._length is None
        if by_close and exc is None:
            self._finish(None)
        elif self._in_body:
            self._finish("the connection closed in the middle of the response")
        else:
            self._finish("the connection closed before a response")

    def _finish(self, error: str | None) -> None:
        transfer, finished = self.transfer, self.finished
        if transfer is None:
            return
        self.transfer = None
        transfer.error = error
        ended_well = error is None and len(transfer.stamps) > 0
        transfer.done_ns = transfer.stamps[-1] if ended_well else self.clock()
        if error is not None:
            self.reusable = False
        if not self.reusable:
            self.close()
        if finished is not None and not finished.done():
            finished.set_result(None)

    def cut(self, status: str, reason: str) -> None:
        """Ends the exchange from this side; `status` becomes the request's."""
        transfer = self.transfer
        if transfer is None:
            return
        transfer.cut = status
        self._decode()
        self._finish(reason)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()
