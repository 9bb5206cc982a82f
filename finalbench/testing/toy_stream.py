"""Server-sent events of the toy server, as one ASGI response with every way to go wrong."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Iterator
from typing import Any

from starlette.types import Receive, Scope, Send

from finalbench.testing.toy_generate import Generation
from finalbench.testing.toy_model import EOS, decode_bytes
from finalbench.testing.toy_protocol import error_body


class CutStream(Exception):
    """Raised inside a started response so that the server drops the connection."""


class EventWriter:
    """Encodes steps of a generation as SSE events; holds back bytes of unfinished characters."""

    def __init__(self, run: Generation, *, chat: bool, ids: bool, usage_asked: bool) -> None:
        behaviour = run.state.behaviour
        self.run = run
        self.chat = chat
        self.ids = ids and behaviour.ids
        self.usage_mode = behaviour.usage
        self.usage_asked = usage_asked or behaviour.usage == "always"
        self.held = b""
        self.sent = 0
        self.first = True
        kind = "chat.completion.chunk" if chat else "text_completion"
        self.head = (
            f'{{"id":"cmpl-{run.number}","object":"{kind}","created":{int(time.time())},'
            f'"model":{json.dumps(run.state.model)},'
        )
        self.line_end = "\r\n" if behaviour.crlf else "\n"

    def frame(self, payload: str, event: str | None = None) -> bytes:
        name = f"event: {event}{self.line_end}" if event else ""
        return f"{name}data: {payload}{self.line_end}{self.line_end}".encode()

    def before(self) -> Iterator[bytes]:
        """Events with no token: role, empty text, comments."""
        behaviour = self.run.state.behaviour
        if behaviour.keepalive:
            yield f": keep-alive{self.line_end}{self.line_end}".encode()
        if behaviour.role_chunk:
            delta = '"delta":{"role":"assistant"}' if self.chat else '"text":""'
            yield self.frame(f'{self.head}"choices":[{{"index":0,{delta},"finish_reason":null}}]}}')
        for _ in range(behaviour.empty_chunks):
            delta = '"delta":{"content":""}' if self.chat else '"text":""'
            yield self.frame(f'{self.head}"choices":[{{"index":0,{delta},"finish_reason":null}}]}}')

    def step(self, tokens: list[int], finish: str | None) -> bytes:
        """One event holding the tokens of one step."""
        text = self._text(tokens, last=finish is not None)
        parts = f'{self.head}"choices":[{{"index":0,{self._content(text)}'
        if self.ids:
            parts += f',"token_ids":[{",".join(map(str, tokens))}]'
            if self.first:
                parts += f',"prompt_token_ids":{self.run.prompt}'
        reason = "null" if finish is None else f'"{finish}"'
        parts += f',"logprobs":null,"finish_reason":{reason}}}]'
        self.sent += len(tokens)
        if self.usage_mode in ("cumulative", "incremental"):
            count = self.sent if self.usage_mode == "cumulative" else len(tokens)
            parts += f',"usage":{json.dumps(self.run.usage(count, len(self.run.prompt)))}'
        self.first = False
        if self.run.state.behaviour.stamp:
            parts += f',"t_ns":{time.monotonic_ns()}'
        return self.frame(parts + "}")

    def _content(self, text: str) -> str:
        shown = json.dumps(text, ensure_ascii=False)
        behaviour = self.run.state.behaviour
        thinking = behaviour.reasoning != "none" and (
            behaviour.reasoning_tokens < 0 or self.sent < behaviour.reasoning_tokens
        )
        if self.chat:
            return f'"delta":{{"{behaviour.reasoning if thinking else "content"}":{shown}}}'
        if thinking:
            return f'"text":"","{behaviour.reasoning}":{shown}'
        return f'"text":{shown}'

    def _text(self, tokens: list[int], *, last: bool) -> str:
        data = self.held + decode_bytes([token for token in tokens if token != EOS])
        cut = len(data)
        if not last:
            for back in range(1, min(4, len(data)) + 1):
                lead = data[-back]
                if lead & 0xC0 == 0x80:
                    continue
                width = 1 if lead < 0x80 else 2 + (lead >= 0xE0) + (lead >= 0xF0)
                cut = len(data) - back if width > back else len(data)
                break
        self.held = data[cut:]
        return data[:cut].decode("utf-8", errors="replace")

    def after(self) -> Iterator[bytes]:
        """Usage event, then `[DONE]`."""
        behaviour = self.run.state.behaviour
        if self.usage_asked and behaviour.usage not in ("absent", "incremental"):
            tail: dict[str, Any] = {"choices": [], "usage": self.run.final_usage()}
            metrics = self.run.metrics()
            if metrics is not None:
                tail["metrics"] = metrics
            yield self.frame(self.head + json.dumps(tail)[1:])
        if not behaviour.no_done:
            yield self.frame("[DONE]")


class StreamReply:
    """An ASGI response that paces the steps of one generation on a fixed schedule."""

    def __init__(self, run: Generation, writer: EventWriter) -> None:
        self.run = run
        self.writer = writer
        self.gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self.run.state
        watcher = asyncio.create_task(self._watch(receive))
        state.counters.waiting += 1
        try:
            async with state.slots:
                state.counters.waiting -= 1
                state.counters.running += 1
                try:
                    await self._stream(send)
                finally:
                    state.counters.running -= 1
        finally:
            watcher.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True

    async def _stream(self, send: Send) -> None:
        behaviour, run, writer = self.run.state.behaviour, self.run, self.writer
        started = time.monotonic()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if behaviour.empty_body:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        for event in writer.before():
            await self._send(send, event)
        due = started + run.state.prefill_seconds(run.prompt, run.number)
        for tokens in run.rounds():
            if behaviour.sync:
                due = self._next_tick(due)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due += run.step_seconds()
            if self.gone:
                return
            finish = None if behaviour.no_finish else run.finish_reason
            await self._send(
                send, writer.step(tokens, behaviour.finish_reason or finish if finish else None)
            )
            if await self._fault(send, len(run.tokens)):
                return
        run.settle()
        if behaviour.done_delay_ms:
            await asyncio.sleep(behaviour.done_delay_ms / 1000.0)
        await self._send(send, b"".join(writer.after()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _next_tick(self, due: float) -> float:
        """The first common tick at or after `due` that is still to come."""
        period = self.run.state.step_seconds(self.run.k, 1) or 0.001
        origin = self.run.state.started
        passed = (max(due, time.monotonic()) - origin) / period
        return origin + math.ceil(passed - 1e-6) * period

    async def _send(self, send: Send, event: bytes) -> None:
        size = self.run.state.behaviour.split_bytes
        if not size:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            return
        for start in range(0, len(event), size):
            piece = event[start : start + size]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)

    async def _fault(self, send: Send, sent: int) -> bool:
        """True when the stream ends here."""
        behaviour = self.run.state.behaviour
        if 0 <= behaviour.die_after < self.run.number:
            os._exit(behaviour.die_code)
        if 0 <= behaviour.cut_after <= sent:
            raise CutStream
        if 0 <= behaviour.stall_after <= sent:
            while not self.gone:
                await asyncio.sleep(0.01)
            return True
        if 0 <= behaviour.error_after <= sent:
            payload = json.dumps(error_body(500, "the engine failed in mid-stream"))
            named = "error" if behaviour.error_style == "event" else None
            done = b"" if behaviour.no_done else self.writer.frame("[DONE]")
            await self._send(send, self.writer.frame(payload, named) + done)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return True
        return False
