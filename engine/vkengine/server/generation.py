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
    from vkengine.tokenizer import Tokenizer

    from .metrics import Metrics

_serial = itertools.count()


class ClientGone(Exception):
    """The client closed the connection; nobody waits for an answer."""


@dataclass(slots=True)
class Delta:
    """What one engine step added to one choice."""

    choice: Choice
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    rendered: bytes | None = None  # set once it is an event, which is made only once


@dataclass(slots=True)
class Choice:
    """One completion of one prompt; the sink of one engine request."""

    generation: Generation
    index: int
    prompt: list[int]
    params: SamplingParams
    stops: StopStrings
    detokenizer: Any = None
    request_id: str = ""
    include_stop: bool = False
    token_count: int = 0
    prompt_logprobs: list[Any] | None = None
    stats: Any = None
    last_s: float | None = None
    done: bool = False
    job: Job = field(init=False)

    def on_output(self, output: Output, now_s: float) -> None:
        generation = self.generation
        if self.done:
            return
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason == "error":
            generation.fail(ApiError(500, output.error or "the engine failed this request"))
            return
        if output.token_ids:
            generation.metrics.on_tokens(self, len(output.token_ids), now_s)
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
        if self.detokenizer is None:
            self.token_count += len(ids)
        else:
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
        self._direct: Callable[[Delta], bool] | None = None
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
        choice = Choice(
            self,
            len(self.choices),
            prompt,
            params,
            StopStrings(tuple(stops), include=include_stop),
            include_stop=include_stop,
            request_id=f"r{next(_serial)}",
        )
        if tokenizer is not None:
            choice.detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
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
        self._direct = None  # what waits here goes out first
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

    async def deltas(self, direct: Callable[[Delta], bool] | None = None) -> list[Delta]:
        """Everything new, at least one; empty when all choices are done.

        While it waits, `direct` may take a delta that finishes nothing by answering True: the
        task need not be woken for it. Raises ApiError, or ClientGone after `fail(ClientGone())`.
        """
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._open == 0:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            self._direct = direct
            try:
                await self._waiter
            except asyncio.CancelledError:  # uvicorn's, when the time to finish is over
                raise ApiError(503, "the server is shutting down", retry_after_s=5) from None
        self._direct = None
        fresh = list(self._deltas)
        self._deltas.clear()
        return fresh

    def _notify(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
