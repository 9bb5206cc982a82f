"""One streamed request: what was asked, every event that came back, and what it amounts to.

Tokens are counted from ids, else from usage, never from chunks. A request is `ok` only when it
ended properly: status 200, a normal finish reason, a terminal `[DONE]` and no error event.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

from finalbench.client.connection import Clock, Transfer
from finalbench.client.http import StreamClient
from finalbench.client.sse import EventParser
from finalbench.client.tally import SpecCounts, Tally, TokenUsage, error_text

Status = Literal["ok", "failed", "cancelled", "incomplete"]
PIECES_PER_STEP = 8

__all__ = ["SpecCounts", "Status", "StreamResult", "TokenUsage", "complete", "interpret"]


@dataclass(frozen=True, slots=True)
class StreamResult:
    """What one request gave. Times in ns of the client's clock.

    `chunks`: (time of the socket read that completed the event, tokens in it) for each event with
    content of any channel; tokens are 0 where the server tells neither ids nor a running usage.
    `connect_ns`: how long opening a connection took, None when a pooled one was used.
    `server_ns`: when the server wrote each chunk, where it says so (the toy, to check the client).
    `text` holds all channels in order of arrival, `reasoning_text` the reasoning ones.
    """

    status: Status
    error: str | None
    http_status: int | None
    sent_ns: int
    connect_ns: int | None
    done_ns: int | None
    chunks: tuple[tuple[int, int], ...]
    token_ids: tuple[int, ...]
    first_chunk_tokens: int
    text: str
    reasoning_text: str
    prompt_token_ids: tuple[int, ...] | None
    usage: TokenUsage | None
    usage_kind: Literal["final", "cumulative", "incremental"] | None
    token_source: Literal["ids", "usage"] | None
    finish_reason: str | None
    stop_reason: int | str | None
    done_seen: bool
    spec: SpecCounts | None
    seed: int | None
    server_ns: tuple[int, ...] = ()

    @property
    def token_count(self) -> int | None:
        """Generated tokens by `token_source`, None when the server tells nothing."""
        if self.token_source == "ids":
            return len(self.token_ids)
        return self.usage.completion if self.usage is not None else None


async def complete(
    client: StreamClient,
    base_url: str,
    body: dict[str, Any] | bytes,
    clock: Clock | None = None,
    *,
    path: str = "/v1/completions",
    timeout_s: float | None = None,
    headers: dict[str, str] | None = None,
) -> StreamResult:
    """Sends one request and reads it to its end. Never raises for what the server does.

    `clock` must be the client's own or None: one clock stamps a request from end to end.
    """
    if clock is not None and clock is not client.clock:
        raise ValueError("clock: the client was made with another clock")
    raw = body if isinstance(body, bytes) else encode_body(body)
    transfer = await client.post(base_url, path, raw, timeout_s=timeout_s, headers=headers)
    return interpret(transfer)


def encode_body(body: dict[str, Any]) -> bytes:
    """The body as bytes, with streaming, usage and token ids asked for."""
    asked = {
        **body,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    return json.dumps(asked, separators=(",", ":")).encode()


def interpret(transfer: Transfer) -> StreamResult:
    """Reads a finished transfer at once."""
    steps = interpret_steps(transfer)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def interpret_steps(transfer: Transfer) -> Generator[None, None, StreamResult]:
    """As `interpret`, giving up control after every few reads so that a loop is never held long."""
    tally = Tally()
    streamed = transfer.http_status == 200
    if streamed:
        parser = EventParser()
        for index, (at, piece) in enumerate(zip(transfer.stamps, transfer.pieces, strict=True)):
            for name, data in parser.feed(piece):
                tally.event(at, name, data)
            if index % PIECES_PER_STEP == PIECES_PER_STEP - 1:
                yield
        rest = parser.rest()
        if rest is not None and rest[1].strip() == b"[DONE]":
            tally.event(transfer.stamps[-1], *rest)
    elif transfer.error is None and transfer.http_status is not None:
        message = error_text(transfer.body())
        tally.fail(f"HTTP {transfer.http_status}: {message}")
    return _result(transfer, tally)


def _result(transfer: Transfer, tally: Tally) -> StreamResult:
    status, error = _judge(transfer, tally)
    totals = tally.totals()
    return StreamResult(
        status=status,
        error=error,
        http_status=transfer.http_status,
        sent_ns=transfer.sent_ns,
        connect_ns=transfer.connect_ns,
        done_ns=transfer.done_ns,
        chunks=totals.chunks,
        token_ids=totals.token_ids,
        first_chunk_tokens=totals.chunks[0][1] if totals.chunks else 0,
        text="".join(tally.text),
        reasoning_text="".join(tally.reasoning),
        prompt_token_ids=tally.prompt_token_ids,
        usage=totals.usage,
        usage_kind=totals.usage_kind,
        token_source=totals.source,
        finish_reason=tally.finish_reason,
        stop_reason=tally.stop_reason,
        done_seen=tally.done_seen,
        spec=tally.spec,
        seed=tally.seed,
        server_ns=tuple(tally.server_ns),
    )


def _judge(transfer: Transfer, tally: Tally) -> tuple[Status, str | None]:
    if transfer.cut in ("failed", "cancelled", "incomplete"):
        return transfer.cut, transfer.error
    if tally.error is not None:
        return "failed", tally.error
    if transfer.error is not None and not tally.done_seen:
        return "failed", transfer.error
    if not tally.events:
        plain = transfer.body().lstrip()[:1] == b"{"
        return "failed", "the server did not stream" if plain else "the response holds no event"
    if not tally.done_seen:
        return "failed", "the stream ended without [DONE]"
    if tally.finish_reason is None:
        return "failed", "the stream ended without a finish reason"
    if tally.finish_reason not in ("stop", "length"):
        return "failed", f"finish_reason is {tally.finish_reason!r}"
    return "ok", None
