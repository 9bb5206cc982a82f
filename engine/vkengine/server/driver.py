"""The engine's own thread: admits waiting requests, steps, and hands outputs to the event loop.

`submit`, `abort` and `close` are called from the event loop; sinks are called on it. One message
crosses the border per step, however many requests ran in it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from vkengine.output import EngineFull, Output

from .errors import ApiError, field_error

if TYPE_CHECKING:
    from vkengine.engine import Engine
    from vkengine.sampling import SamplingParams

log = logging.getLogger("vkengine")


class Sink(Protocol):
    """Where one request's outputs go."""

    def on_output(self, output: Output, now_s: float) -> None: ...

    def on_error(self, error: ApiError) -> None: ...


@dataclass(slots=True)
class Job:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    sink: Sink
    may_be_cut: bool = False  # a stop string can end it where the engine sees no end
    queued_s: float = field(default_factory=time.monotonic)
    admitted_s: float | None = None


class Driver:
    """Owns the engine. `max_waiting` bounds the queue in front of it, in requests."""

    def __init__(self, engine: Engine, *, max_waiting: int) -> None:
        self.engine = engine
        self.max_waiting = max_waiting
        self.failure: str | None = None
        self.rejected = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._aborts: list[str] = []
        self._running: dict[str, Job] = {}  # touched by the engine's thread alone
        self._may_be_cut: set[str] = set()  # which of those
        self._jobs: dict[str, Job] = {}  # touched by the event loop alone
        self._closing = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="vk-engine", daemon=True)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def submit(self, jobs: list[Job]) -> None:
        """All of a body's jobs or none. Raises ApiError(503) when the queue is full."""
        if self.failure is not None:
            raise ApiError(500, f"the engine stopped: {self.failure}")
        with self._wake:
            if self._closing:
                raise ApiError(503, "the server is shutting down", retry_after_s=5)
            if len(jobs) > self.max_waiting + self.engine.max_sequences:
                raise ApiError(400, f"{len(jobs)} prompts times n are more than the queue holds")
            # An idle engine takes its first jobs straight away, so they need no place to wait.
            free = max(0, self.engine.max_sequences - len(self._running))
            if len(self._waiting) + len(jobs) > self.max_waiting + free:
                self.rejected += len(jobs)
                raise ApiError(
                    503,
                    f"the queue is full: {len(self._waiting)} requests wait",
                    retry_after_s=1,
                )
            for job in jobs:
                self._jobs[job.request_id] = job
            self._waiting.extend(jobs)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """Frees the request's slot before the next step; unknown ids are ignored."""
        if self._jobs.pop(request_id, None) is None:
            return
        with self._wake:
            self._aborts.append(request_id)
            self._wake.notify()

    def knows(self, request_id: str) -> bool:
        return request_id in self._jobs

    def close(self, *, wait_s: float = 30.0) -> None:
        """Stops the thread after the step it is in, then closes the engine."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(wait_s)
        if not self._thread.is_alive() and not self._closed:
            self._closed = True
            self.engine.close()

    def _run(self) -> None:
        step, has_work = self.engine.step, self.engine.has_work
        try:
            while True:
                # Steps follow each other without the lock; what comes meanwhile is seen one later.
                if self._waiting or self._aborts or self._closing or not has_work():
                    if not self._collect():
                        break
                    if not has_work():
                        continue
                self._hand_over(step(), time.monotonic())
        except Exception as error:  # the thread's last words: every request hears them
            log.exception("the engine stopped")
            reason = f"{type(error).__name__}: {error}"
            self._post(self._fail, reason)

    def _collect(self) -> bool:
        """Waits for something to do and applies it. False: time to stop."""
        with self._wake:
            while not (
                self._closing or self._aborts or self._can_admit() or self.engine.has_work()
            ):
                self._wake.wait()
            if self._closing:
                return False
            aborts, self._aborts = self._aborts, []
            if aborts:
                gone = set(aborts)
                self._waiting = deque(j for j in self._waiting if j.request_id not in gone)
        for request_id in aborts:
            self._may_be_cut.discard(request_id)
            if self._running.pop(request_id, None) is not None:
                self.engine.abort(request_id)
        self._admit()
        return True

    def _can_admit(self) -> bool:
        return bool(self._waiting) and len(self._running) < self.engine.max_sequences

    def _admit(self) -> None:
        while self._can_admit():
            with self._wake:
                if not self._waiting:
                    return
                job = self._waiting[0]
            try:
                self.engine.add(job.request_id, job.prompt, job.params)
            except EngineFull:
                if not self._running:
                    self._drop(job, ApiError(503, "no memory for this request", retry_after_s=5))
                    continue
                return
            except ValueError as error:
                self._drop(job, field_error(error))
                continue
            job.admitted_s = time.monotonic()
            self._running[job.request_id] = job
            if job.may_be_cut:
                self._may_be_cut.add(job.request_id)
            self._take(job)

    def _take(self, job: Job) -> None:
        with self._wake:
            if self._waiting and self._waiting[0] is job:
                self._waiting.popleft()

    def _drop(self, job: Job, error: ApiError) -> None:
        self._take(job)
        self._post(self._deliver_error, job.request_id, error)

    def _hand_over(self, outputs: list[Output], now_s: float) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._running.pop(output.request_id, None)
                self._may_be_cut.discard(output.request_id)
            elif output.request_id in self._may_be_cut:
                output.stats = self.engine.progress(output.request_id)
        if outputs:
            self._post(self._deliver, outputs, now_s)

    def _post(self, call, *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is gone: nobody listens any more
            self._closing = True

    def _deliver(self, outputs: list[Output], now_s: float) -> None:
        for output in outputs:
            job = self._jobs.get(output.request_id)
            if job is None:
                continue
            if output.finish_reason is not None:
                del self._jobs[output.request_id]
            job.sink.on_output(output, now_s)

    def _deliver_error(self, request_id: str, error: ApiError) -> None:
        job = self._jobs.pop(request_id, None)
        if job is not None:
            if error.status == 503:
                self.rejected += 1
            job.sink.on_error(error)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.sink.on_error(ApiError(500, f"the engine stopped: {reason}"))
