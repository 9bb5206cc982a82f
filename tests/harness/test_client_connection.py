"""One connection: responses of every framing, cut anywhere, and broken in every place."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finalbench.client.connection import Connection, Transfer
from finalbench.client.http import StreamClient

BODY = b'data: {"x": 10}\n\ndata: [DONE]\n\n'
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Two: a\r\n\r\n"
    b"11\r\n" + BODY[:17] + b"\r\ne\r\n" + BODY[17:] + b"\r\n0\r\n\r\n"
)
LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
CLOSED = b"HTTP/1.0 200 OK\r\n\r\n" + BODY
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH
TRAILED = CHUNKED[:-2] + b"X-Sum: 1\r\n\r\n"
# A chunk whose payload looks like the end of a chunked response.
TRICKY_BODY = b"data: 10\r\n\r\n"
TRICKY = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nc\r\n" + TRICKY_BODY + b"\r\n"


class Wire(asyncio.Transport):
    """A transport that only remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted


def exchange(
    pieces: list[bytes], *, close: bool = False, fault: Exception | None = None
) -> tuple[Transfer, Connection]:
    """A transfer after the pieces have arrived, on a clock that counts its readings."""

    async def go() -> tuple[Transfer, Connection]:
        clock = count(1)
        connection = Connection(lambda: next(clock))
        connection.connection_made(Wire())
        transfer = Transfer()
        finished = connection.start(b"POST", transfer)
        for piece in pieces:
            connection.data_received(piece)
        if close:
            connection.connection_lost(fault)
        if finished.done():
            finished.result()
        else:
            finished.cancel()
            transfer.error = "unfinished"
        return transfer, connection

    return asyncio.run(go())


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at, turn = [], 0, 0
    while at < len(data):
        pieces.append(data[at : at + sizes[turn % len(sizes)]])
        at, turn = at + sizes[turn % len(sizes)], turn + 1
    return pieces


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([CHUNKED, LENGTH, CLOSED, CONTINUED, TRAILED]),
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
)
def test_any_cut_gives_the_same_body(response: bytes, sizes: list[int]) -> None:
    transfer, connection = exchange(cut(response, sizes), close=response is CLOSED)
    assert transfer.error is None
    assert transfer.http_status == 200
    assert transfer.body() == BODY
    assert len(transfer.stamps) == len(transfer.pieces)
    assert connection.reusable == (response is not CLOSED)


def test_a_payload_that_looks_like_the_end_is_not_the_end() -> None:
    half, _ = exchange([TRICKY])
    assert half.error == "unfinished"
    whole, _ = exchange([TRICKY, b"0\r\n\r\n"])
    assert whole.error is None
    assert whole.body() == TRICKY_BODY


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([CHUNKED, LENGTH, TRAILED]), st.data())
def test_every_early_end_is_an_error(response: bytes, data: st.DataObject) -> None:
    """F01, T10: a response that stops anywhere before its end never passes for whole."""
    stop = data.draw(st.integers(0, len(response) - 1))
    transfer, connection = exchange([response[:stop]] if stop else [], close=True)
    assert transfer.error is not None and transfer.error.startswith("the connection closed")
    assert not connection.reusable
    assert BODY.startswith(transfer.body())


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP response"),
        (b"HTTP/1.1 abc\r\n\r\n", "not an HTTP response"),
        (b"x" * 70_000, "head is too long"),
        (CHUNKED.replace(b"11\r\n", b"zz\r\n", 1), "bad chunk size"),
        (CHUNKED + b"extra", "after the end"),
        (LENGTH + b"extra", "more bytes than content-length"),
    ],
)
def test_what_is_not_http_is_said(response: bytes, message: str) -> None:
    transfer, connection = exchange([response])
    assert transfer.error is not None and message in transfer.error
    assert not connection.open


def test_a_reset_in_a_body_without_length_is_an_error() -> None:
    transfer, _ = exchange([CLOSED], close=True, fault=ConnectionResetError())
    assert transfer.error == "the connection closed in the middle of the response"


def test_a_cut_keeps_what_came() -> None:
    async def go() -> tuple[Transfer, Connection]:
        connection = Connection(lambda: 5)
        connection.connection_made(Wire())
        transfer = Transfer()
        finished = connection.start(b"POST", transfer)
        connection.data_received(CHUNKED[:-10])
        connection.cut("incomplete", "cut by the time limit")
        await finished
        connection.cut("cancelled", "again")  # too late to change anything
        connection.data_received(b"late")
        return transfer, connection

    transfer, connection = asyncio.run(go())
    assert (transfer.cut, transfer.error) == ("incomplete", "cut by the time limit")
    assert transfer.body() == BODY[: len(transfer.body())]
    assert not connection.open


def test_bytes_nobody_asked_for_close_the_connection() -> None:
    transfer, connection = exchange([LENGTH])
    assert transfer.error is None and connection.open
    connection.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert not connection.open and not connection.reusable


def test_the_request_on_the_wire() -> None:
    """Nothing that a server might compress, and a path behind a prefix."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head + await reader.readexactly(2))
        writer.write(LENGTH)
        await writer.drain()
        writer.close()

    async def go() -> Transfer:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, StreamClient() as client:
            url = f"http://127.0.0.1:{port}/base/"
            return await client.post(url, "/v1/x", b"{}", headers={"Authorization": "Bearer k"})

    assert asyncio.run(go()).body() == BODY
    lines = seen[0].decode().split("\r\n")
    assert lines[0] == "POST /base/v1/x HTTP/1.1"
    assert {"Accept-Encoding: identity", "Authorization: Bearer k", "Content-Length: 2"} <= set(
        lines
    )
    assert seen[0].endswith(b"\r\n\r\n{}")
