"""Pooled connections for timed requests. Connecting is timed apart from the request."""

from __future__ import annotations

import asyncio
import ssl
import time
from urllib.parse import SplitResult, urlsplit

from finalbench.client.arrival import ArrivalTransport, connect
from finalbench.client.connection import Clock, Connection, Transfer


class StreamClient:
    """A pool of connections without a cap. Use as an async context manager in one event loop."""

    def __init__(self, clock: Clock = time.monotonic_ns, *, connect_timeout_s: float = 10.0):
        self.clock = clock
        self.connect_timeout_s = connect_timeout_s
        self.connects = 0
        self._idle: dict[tuple[str, int, bool], list[Connection]] = {}
        self._busy: set[Connection] = set()

    async def __aenter__(self) -> StreamClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
        await asyncio.sleep(0)

    def close(self) -> None:
        """Drops all connections; exchanges in flight end as cancelled."""
        for connection in list(self._busy):
            connection.cut("cancelled", "the client was closed")
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def cut_all(self, status: str, reason: str) -> int:
        """Ends every exchange in flight with `status`; returns how many there were."""
        busy = [connection for connection in self._busy if connection.transfer is not None]
        for connection in busy:
            connection.cut(status, reason)
        return len(busy)

    async def connect(self, base_url: str, count: int) -> None:
        """Opens connections ahead of time, so that no request pays for one. OSError as raised."""
        key = _address(base_url)
        ready = [c for c in self._idle.get(key, ()) if c.open]
        missing = count - len(ready)
        for _ in range(0, max(0, missing), 64):
            batch = [self._open(key) for _ in range(min(64, missing))]
            missing -= len(batch)
            ready += await asyncio.gather(*batch)
        self._idle[key] = ready

    async def _open(self, key: tuple[str, int, bool]) -> Connection:
        host, port, secure = key
        async with asyncio.timeout(self.connect_timeout_s):
            if secure:
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self.clock), host, port, ssl=ssl.create_default_context()
                )
            else:
                sock = await connect(host, port)
                connection = Connection(self.clock)
                connection.transport = ArrivalTransport(sock, connection, self.clock)
        self.connects += 1
        return connection

    async def post(
        self,
        base_url: str,
        path: str,
        body: bytes,
        *,
        timeout_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> Transfer:
        """One exchange, never retried once a byte has come back. Failures are in the transfer."""
        key = _address(base_url)
        request = _encode_request(urlsplit(base_url), path, body, headers or {})
        transfer = Transfer()
        while True:
            connection, reused = self._take(key), True
            if connection is None:
                reused = False
                begun = self.clock()
                try:
                    connection = await self._open(key)
                except (OSError, TimeoutError) as error:
                    transfer.sent_ns = transfer.sent_ns or begun
                    transfer.done_ns = self.clock()
                    transfer.error = f"cannot connect: {error or type(error).__name__}"
                    return transfer
                transfer.connect_ns = self.clock() - begun
            await self._exchange(connection, request, transfer, timeout_s)
            if connection.reusable and connection.open:
                self._idle.setdefault(key, []).append(connection)
            # A pooled connection may have been closed by the server while it was idle.
            stale = transfer.http_status is None and transfer.cut is None
            if not (reused and stale and transfer.error and "before a response" in transfer.error):
                return transfer
            transfer.error = None

    async def _exchange(
        self, connection: Connection, request: bytes, transfer: Transfer, timeout_s: float | None
    ) -> None:
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None
        self._busy.add(connection)
        try:
            finished = connection.start(request, transfer)
            if timeout_s is not None:
                timer = loop.call_later(
                    timeout_s, connection.cut, "failed", f"timed out after {timeout_s:g} s"
                )
            await finished
        except asyncio.CancelledError:
            connection.cut("cancelled", "cancelled")
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._busy.discard(connection)

    def _take(self, key: tuple[str, int, bool]) -> Connection | None:
        idle = self._idle.get(key, [])
        while idle:
            connection = idle.pop()
            if connection.open and connection.reusable:
                return connection
        return None


def _address(base_url: str) -> tuple[str, int, bool]:
    parts = urlsplit(base_url)
    secure = parts.scheme == "https"
    return parts.hostname or "127.0.0.1", parts.port or (443 if secure else 80), secure


def _encode_request(parts: SplitResult, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST {parts.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
        f"Accept-Encoding: identity\r\n{extra}"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("latin-1") + body
