"""A core as soon as it is needed: who waits for one stamps late, however fast it reads.

Linux shares cores fairly, and a client that reads all the time gets its turn after milliseconds
where others compute. Under a real-time policy it gets it at once. The system allows that to root,
and to others by `ulimit -r`; without it the client goes on as it is, and says so.

Source: sched(7).
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

Scheduling = Literal["real-time", "shared"]
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


@contextmanager
def first_in_line() -> Generator[Scheduling]:
    """Round-robin real time for this thread while inside, where that is allowed.

    Processes started inside do not inherit it.
    """
    left: Scheduling | None = None  # as it is, by whom or what keeps us from more
    try:
        policy = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
        if policy != os.SCHED_OTHER:  # somebody has decided already
            left = "real-time" if policy in (os.SCHED_RR, os.SCHED_FIFO) else "shared"
        else:
            lowest = os.sched_param(os.sched_get_priority_min(os.SCHED_RR))
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, lowest)
    except (AttributeError, OSError):  # another system, or not allowed
        left = "shared"
    if left is not None:
        yield left
        return
    try:
        yield "real-time"
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def waited_ns() -> int | None:
    """How long this thread has waited for a core so far; None where that is not told."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
