"""Sends one generation to its client and notices when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse

from .connection import chunk_sender
from .errors import ApiError
from .generation import ClientGone
from .render import DONE

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from .generation import Delta, Generation
    from .render import Renderer

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer:
    """An ASGI response: events as the engine makes them, or one JSON document.

    The status line waits for the first output, so whatever the engine refuses is a proper 4xx.
    """

    def __init__(
        self, generation: Generation, renderer: Renderer, *, stream: bool, limit_s: float
    ) -> None:
        self._generation = generation
        self._renderer = renderer
        self._stream = stream
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _watch(receive, self._generation, self._limit_s):
            try:
                self._generation.start()
                if self._stream:
                    await self._send_events(send, chunk_sender(scope))
                    return
                response = JSONResponse(await self._whole())
            except ApiError as error:
                response = error.response()
            except ClientGone:
                return
            finally:
                self._generation.abort()
        await response(scope, receive, send)

    async def _whole(self) -> dict[str, Any]:
        while deltas := await self._generation.deltas():
            for delta in deltas:
                self._renderer.collect(delta)
        return self._renderer.answer()

    async def _send_events(self, send: Send, now: Callable[[bytes], bool] | None) -> None:
        write = now or partial(_sent_at_once, send)
        deltas = await self._generation.deltas()
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        chunk = self._renderer.chunk
        for choice in self._generation.choices:
            if not choice.job.may_be_cut:
                choice.plain_chunk = self._renderer.plain_chunk(choice)

        def direct(delta: Delta) -> bool:
            delta.rendered = body = chunk(delta)
            return write(body)

        try:
            while deltas:
                body = b"".join([delta.rendered or chunk(delta) for delta in deltas])
                await send({"type": "http.response.body", "body": body, "more_body": True})
                deltas = await self._generation.deltas(direct, write)
            body = self._renderer.last_chunk()
        except ApiError as error:
            body = b"data: " + json.dumps(error.body()).encode() + b"\n\n" + DONE
        await send({"type": "http.response.body", "body": body})


def _sent_at_once(send: Send, body: bytes) -> bool:
    """The same through ASGI, for other servers than ours.

    uvicorn waits in `send` only for a full buffer, and before it writes anything; a send that
    would wait is dropped whole, and the caller's task does it again.
    """
    sending: Any = send({"type": "http.response.body", "body": body, "more_body": True})
    try:
        sending.send(None)
    except StopIteration:
        return True
    sending.close()
    return False


@contextlib.asynccontextmanager
async def _watch(receive: Receive, generation: Generation, limit_s: float) -> AsyncGenerator[None]:
    """Fails the generation when the client disconnects or the time is over."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.fail(ClientGone())

    def expire() -> None:
        generation.fail(ApiError(408, f"the request took longer than {limit_s:g} s"))

    watcher = asyncio.create_task(until_gone())
    timer = asyncio.get_running_loop().call_later(limit_s, expire)
    try:
        yield
    finally:
        timer.cancel()
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
