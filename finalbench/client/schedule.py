"""What is sent and when, decided before the first send; and what came of it. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from finalbench.client.stream import StreamResult
from finalbench.client.turn import Scheduling
from finalbench.errors import UsageError

MAX_IN_FLIGHT = 1024
NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send. `body` is encoded beforehand; `index` is the caller's own number."""

    index: int
    body: bytes
    path: str = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Load:
    """How jobs are sent. `rate_per_s` is for the open loops, `seed` for Poisson arrivals.

    closed: `concurrency` streams, each sends when its last request ended. poisson, constant: by
    the clock; at most `concurrency` in flight, later ones wait and keep their scheduled time.
    After `time_limit_s` nothing is sent and what is in flight ends as incomplete.
    """

    mode: Literal["closed", "poisson", "constant"] = "closed"
    concurrency: int = 1
    rate_per_s: float | None = None
    seed: int = 0
    time_limit_s: float | None = None
    request_timeout_s: float | None = 600.0

    def check(self) -> None:
        """UsageError for a load that cannot be run."""
        if not 1 <= self.concurrency <= MAX_IN_FLIGHT:
            raise UsageError(f"concurrency: must be 1 to {MAX_IN_FLIGHT}, not {self.concurrency}")
        if self.mode != "closed" and not (self.rate_per_s and self.rate_per_s > 0):
            raise UsageError(f"rate_per_s: mode {self.mode} needs a rate above 0")

    def arrivals_ns(self, count: int) -> list[int]:
        """Scheduled times of an open loop, ns from its start; the same seed gives the same."""
        rate = self.rate_per_s or 1.0
        if self.mode == "constant":
            return [round(index * NS / rate) for index in range(count)]
        draw, at, times = random.Random(self.seed), 0.0, []
        for _ in range(count):
            times.append(round(at * NS))
            at += draw.expovariate(rate)
        return times


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request of a cell. `scheduled_ns` is when it should have been sent."""

    job: Job
    scheduled_ns: int
    result: StreamResult

    @property
    def lag_ns(self) -> int:
        """How late it was sent, the opening of a connection included."""
        return self.result.sent_ns - self.scheduled_ns


@dataclass(frozen=True, slots=True)
class CellRun:
    """All of a cell. `outcomes` in order of scheduled time; `unsent` jobs were never scheduled.

    `waited_ns`: how long the client waited for a core meanwhile; None where that is not told.
    """

    outcomes: tuple[Outcome, ...]
    started_ns: int
    ended_ns: int
    max_in_flight: int
    unsent: int
    connects: int
    stopped: bool
    scheduling: Scheduling = "shared"
    waited_ns: int | None = None

    def count(self, status: str) -> int:
        return sum(1 for outcome in self.outcomes if outcome.result.status == status)
