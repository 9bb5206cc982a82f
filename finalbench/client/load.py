"""Many requests: closed loop, Poisson and constant-rate open loop, up to 1,024 at once.

The schedule is fixed before the first send and every request keeps its scheduled time, so a
client that falls behind shows as lag, never as better latency. Reading responses is put off and
done in short slices, so that one stream's bookkeeping does not delay another's time stamps.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from finalbench.client.connection import Transfer
from finalbench.client.http import StreamClient
from finalbench.client.schedule import MAX_IN_FLIGHT, NS, CellRun, Job, Load, Outcome
from finalbench.client.stream import interpret, interpret_steps
from finalbench.client.turn import first_in_line, waited_ns

__all__ = ["MAX_IN_FLIGHT", "CellRun", "Job", "Load", "Outcome", "run_cell"]

_SLICE_NS = 150_000


@dataclass
class _Cell:
    """The moving parts of one run. `over` ends sending; `ending` says with which status."""

    client: StreamClient
    base_url: str
    load: Load
    on_outcome: Callable[[Outcome], None] | None
    headers: dict[str, str] | None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    ending: tuple[str, str] = ("cancelled", "stopped by the user")
    waiting: deque[tuple[Job, int, Transfer]] = field(default_factory=deque)
    more: asyncio.Event = field(default_factory=asyncio.Event)
    all_sent: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    in_flight: int = 0
    max_in_flight: int = 0

    def end(self, status: str, reason: str) -> None:
        if not self.over.is_set():
            self.ending = (status, reason)
            self.over.set()
            self.client.cut_all(status, reason)

    async def send(self, job: Job) -> Transfer:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            return await self.client.post(
                self.base_url,
                job.path,
                job.body,
                timeout_s=self.load.request_timeout_s,
                headers=self.headers,
            )
        finally:
            self.in_flight -= 1

    def hand_over(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if self.on_outcome is not None:
            self.on_outcome(outcome)

    def put_off(self, job: Job, scheduled_ns: int, transfer: Transfer) -> None:
        self.waiting.append((job, scheduled_ns, transfer))
        self.more.set()

    async def read(self) -> None:
        """Turns transfers into outcomes, giving way after every slice, until all are read."""
        clock = self.client.clock
        while True:
            if not self.waiting:
                if self.all_sent:
                    return
                self.more.clear()
                await self.more.wait()
                continue
            job, scheduled_ns, transfer = self.waiting.popleft()
            steps, begun = interpret_steps(transfer), clock()
            while True:
                try:
                    next(steps)
                except StopIteration as finished:
                    self.hand_over(Outcome(job, scheduled_ns, finished.value))
                    break
                if clock() - begun > _SLICE_NS:
                    await asyncio.sleep(0)
                    begun = clock()
            await asyncio.sleep(0)

    async def one_stream(self, jobs: Iterator[Job]) -> None:
        """A closed loop of one: answers are read between requests, not during the next one."""
        scheduled = self.client.clock()
        for job in jobs:
            transfer = await self.send(job)
            self.hand_over(Outcome(job, scheduled, interpret(transfer)))
            if self.over.is_set():
                return
            scheduled = self.client.clock()

    async def closed_stream(self, jobs: Iterator[Job]) -> None:
        scheduled = self.client.clock()
        for job in jobs:
            transfer = await self.send(job)
            self.put_off(job, scheduled, transfer)
            if self.over.is_set():
                return
            scheduled = transfer.done_ns or self.client.clock()

    async def open_loop(self, jobs: Iterator[Job], arrivals_ns: Sequence[int]) -> None:
        gate = asyncio.Semaphore(self.load.concurrency)
        clock, start = self.client.clock, self.client.clock()
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals_ns:
                due = start + arrival
                while (wait := due - clock()) > 0 and not self.over.is_set():
                    await _wait(self.over, wait / NS)
                if self.over.is_set():
                    return
                group.create_task(self._gated(gate, next(jobs), due))

    async def _gated(self, gate: asyncio.Semaphore, job: Job, due: int) -> None:
        async with gate:
            if not self.over.is_set():
                self.put_off(job, due, await self.send(job))
                return
        # Scheduled, but its turn never came: it is counted, not lost.
        status, reason = self.ending
        now = self.client.clock()
        self.put_off(job, due, Transfer(sent_ns=now, done_ns=now, cut=status, error=reason))


async def run_cell(
    client: StreamClient,
    base_url: str,
    jobs: Sequence[Job],
    load: Load,
    *,
    on_outcome: Callable[[Outcome], None] | None = None,
    stop: asyncio.Event | None = None,
    headers: dict[str, str] | None = None,
) -> CellRun:
    """Sends all jobs under `load` and reads all answers. Failures of requests are outcomes.

    `on_outcome` is called once per request, soon after it ended (between requests when there is
    one stream); it should be quick. Setting `stop` ends requests in flight as cancelled and
    returns what there is. Connections are opened before the first send.
    """
    load.check()
    cell = _Cell(client, base_url, load, on_outcome, headers)
    connects = client.connects
    with suppress(OSError, TimeoutError):
        # Without a server each request fails on its own and says why.
        await client.connect(base_url, min(load.concurrency, len(jobs)))
    queue = iter(jobs)
    started = client.clock()
    with _quiet_collector(), first_in_line() as scheduling:
        waited = waited_ns()
        reader = asyncio.create_task(cell.read())
        reader.add_done_callback(lambda _: cell.end("cancelled", "a result could not be stored"))
        guard = asyncio.create_task(_guard(cell, stop or asyncio.Event(), load.time_limit_s))
        try:
            await _send_all(cell, queue, len(jobs))
        except BaseException:
            reader.cancel()
            raise
        finally:
            guard.cancel()
            cell.all_sent = True
            cell.more.set()
        await reader
        waited_after = waited_ns()
    return CellRun(
        outcomes=tuple(sorted(cell.outcomes, key=lambda o: (o.scheduled_ns, o.job.index))),
        started_ns=started,
        ended_ns=client.clock(),
        max_in_flight=cell.max_in_flight,
        unsent=sum(1 for _ in queue),
        connects=client.connects - connects,
        stopped=stop is not None and stop.is_set(),
        scheduling=scheduling,
        waited_ns=None if waited is None or waited_after is None else waited_after - waited,
    )


async def _send_all(cell: _Cell, queue: Iterator[Job], count: int) -> None:
    load = cell.load
    if load.mode != "closed":
        await cell.open_loop(queue, load.arrivals_ns(count))
    elif load.concurrency == 1:
        await cell.one_stream(queue)
    else:
        streams = min(load.concurrency, count)
        await asyncio.gather(*(cell.closed_stream(queue) for _ in range(streams)))


async def _guard(cell: _Cell, stop: asyncio.Event, limit_s: float | None) -> None:
    """Ends what is in flight when the caller says stop or the time is up."""
    if await _wait(stop, limit_s):
        cell.end("cancelled", "stopped by the user")
    else:
        cell.end("incomplete", f"cut by the time limit of {limit_s:g} s")


async def _wait(event: asyncio.Event, seconds: float | None) -> bool:
    """True when the event came before the time was over."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


@contextmanager
def _quiet_collector() -> Generator[None]:
    """Keeps the cycle collector out of the time stamps; it runs before and after."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
