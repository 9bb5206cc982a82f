"""One HTTP request's choices: engine outputs in, text deltas out, all on the event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .driver import Driver, Job
from .errors import ApiError
from .stops import StopStrings

if TYPE_CHECKING:
    from vkengine.output import Output, TokenLogprobs
    from vkengine.sampling import SamplingParams
    from vkengine.tokenizer import Detokenizer, Tokenizer

    from .metrics import Metrics

Direct = Callable[["Delta"], bool]
Write = Callable[[bytes], bool]
_serial = itertools.count()


class ClientGone(Exception):
    """The client closed the connection; nobody waits for an answer."""


class _NoText:
    """In place of a detokenizer where there is no tokenizer."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(slots=True)
class Delta:
    """What one engine step added to one choice."""

    choice: Choice
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    rendered: bytes | None = None  # set once it is an event, which is made only once


@dataclass(slots=True)
class Choice:
    """One completion of one prompt; the sink of one engine request."""

    generation: Generation
    index: int
    prompt: list[int]
    params: SamplingParams
    stops: StopStrings
    detokenizer: Detokenizer
    request_id: str = ""
    include_stop: bool = False
    token_count: int = 0
    prompt_logprobs: list[Any] | None = None
    stats: Any = None
    last_s: float | None = None
    done: bool = False
    #: Renders text and ids of a choice that has started; None where a chunk may hold more.
    plain_chunk: Callable[[str, list[int]], bytes] | None = None
    job: Job = field(init=False)

    def on_output(self, output: Output, now_s: float) -> None:
        generation = self.generation
        if self.done:
            return
        finish, ids = output.finish_reason, output.token_ids
        write = generation.write
        if (
            write is not None
            and self.plain_chunk is not None
            and self.last_s is not None
            and finish is None
            and ids
        ):
            # Most chunks of most streams: as few calls as can be, for each of them costs
            # microseconds where other work has emptied the caches since the last one.
            generation.metrics.on_step(now_s - self.last_s, len(ids))
            self.last_s = now_s
            push = self.detokenizer.push
            text = push(ids[0]) if len(ids) == 1 else "".join(map(push, ids))
            body = self.plain_chunk(text, ids)
            if not write(body):
                generation.queue(Delta(self, text, ids, rendered=body))
            return
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if finish == "error":
            generation.fail(ApiError(500, output.error or "the engine failed this request"))
            return
        if ids:
            generation.metrics.on_tokens(self, len(ids), now_s)
        delta = self._read(output)
        if output.stats is not None:
            self.stats = output.stats
        if delta.finish_reason is not None:
            self.done = True
            generation.metrics.on_finish(self, delta.finish_reason, now_s)
        generation.deliver(delta)

    def on_error(self, error: ApiError) -> None:
        self.generation.fail(error)

    def _read(self, output: Output) -> Delta:
        finish, reason = output.finish_reason, output.stop_reason
        ids = output.token_ids
        text = ""
        # The text of a stop token is shown only on request.
        silent = len(ids) - 1 if finish == "stop" and not self.include_stop else len(ids)
        for position, token_id in enumerate(ids):
            self.token_count += 1
            if position == silent:
                break
            text += self._show(self.detokenizer.push(token_id))
            if self.stops.matched is not None:
                return self._stop(output, position + 1, text)
        if finish is not None:
            text += self._show(self.detokenizer.flush())
            if self.stops.matched is not None:
                return self._stop(output, len(ids), text)
            text += self.stops.flush()
        return Delta(self, text, ids, output.logprobs, finish, reason)

    def _show(self, piece: str) -> str:
        if self.token_count <= self.params.min_tokens:
            return piece
        return self.stops.push(piece)

    def _stop(self, output: Output, kept: int, text: str) -> Delta:
        """A stop string ended the text inside this step: the rest of the step never was."""
        logprobs = output.logprobs[:kept] if output.logprobs is not None else None
        if output.finish_reason is None:
            self.generation.driver.abort(self.request_id)
        ids = output.token_ids[:kept]
        return Delta(self, text, ids, logprobs, "stop", self.stops.matched)


class Generation:
    """All choices of one request, in order of prompt, then choice."""

    def __init__(self, driver: Driver, metrics: Metrics) -> None:
        self.driver = driver
        self.metrics = metrics
        self.choices: list[Choice] = []
        self._deltas: deque[Delta] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._direct: Direct | None = None
        self.write: Write | None = None  # set while nothing waits to be sent first
        self._open = 0

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None,
        stops: Sequence[str],
        include_stop: bool,
        skip_special_tokens: bool,
    ) -> None:
        detokenizer: Detokenizer = _NoText()
        if tokenizer is not None:
            detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        choice = Choice(
            self,
            len(self.choices),
            prompt,
            params,
            StopStrings(tuple(stops), include=include_stop),
            detokenizer,
            include_stop=include_stop,
            request_id=f"r{next(_serial)}",
        )
        choice.job = Job(choice.request_id, prompt, params, choice, may_be_cut=bool(stops))
        self.choices.append(choice)

    def start(self) -> None:
        """Raises ApiError when the queue is full or the engine is gone."""
        self.driver.submit([choice.job for choice in self.choices])
        self._open = len(self.choices)

    def deliver(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self._open -= 1
        elif self._direct is not None and self._direct(delta):
            return
        self.queue(delta)

    def queue(self, delta: Delta) -> None:
        """Leaves it to the task that waits in `deltas`."""
        self._direct = self.write = None  # what waits here goes out first
        self._deltas.append(delta)
        self._notify()

    def fail(self, error: Exception) -> None:
        """Ends every choice: one failed choice fails its request."""
        if self._error is None:
            self._error = error
        self.abort()
        self._notify()

    def abort(self) -> None:
        for choice in self.choices:
            if not choice.done:
                choice.done = True
                self.metrics.on_abort(choice)
                self.driver.abort(choice.request_id)

    async def deltas(self, direct: Direct | None = None, write: Write | None = None) -> list[Delta]:
        """Everything new, at least one; empty when all choices are done.

        While it waits, `direct` may take a delta that finishes nothing and `write` a plain chunk,
        each answering True: the task need not be woken for it. Raises ApiError, or ClientGone after
        `fail(ClientGone())`.
        """
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._open == 0:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            self._direct = direct
            self.write = write
            try:
                await self._waiter
            except asyncio.CancelledError:  # uvicorn's, when the time to finish is over
                raise ApiError(503, "the server is shutting down", retry_after_s=5) from None
        self._direct = self.write = None
        fresh = list(self._deltas)
        self._deltas.clear()
        return fresh

    def _notify(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
