"""SIGINT and SIGTERM, both as KeyboardInterrupt, and held back while something must not be cut.

A second signal during the clean-up is ignored: the clean-up is bounded in time, and cutting it is
what leaves processes behind.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Handlers in force between `install` and `restore`; only in the main thread."""

    def __init__(self) -> None:
        self._shielded = False
        self._pending = False
        self._requested = False
        self._callback: Callable[[], None] | None = None
        self._previous: dict[int, object] = {}

    @contextlib.contextmanager
    def installed(self) -> Generator[Interrupts]:
        main = threading.current_thread() is threading.main_thread()
        if main:
            # Shells start background jobs with SIGINT ignored, so both are set explicitly.
            self._previous = {n: signal.signal(n, self._handle) for n in _SIGNALS}
        try:
            yield self
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)  # ty: ignore[invalid-argument-type]

    @contextlib.contextmanager
    def shielded(self) -> Generator[None]:
        """Hold signals back; they are delivered when the block ends."""
        outer, self._shielded = self._shielded, True
        try:
            yield
        finally:
            self._shielded = outer
        if self._pending and not self._shielded:
            self._pending = False
            self._deliver()

    @contextlib.contextmanager
    def diverted(self, callback: Callable[[], None]) -> Generator[None]:
        """Call `callback` in place of raising, for an event loop that must end in order."""
        outer, self._callback = self._callback, callback
        try:
            yield
        finally:
            self._callback = outer

    def check(self) -> None:
        """Raise again what was raised where Python cannot pass it on (at fork, in finalizers)."""
        if self._requested:
            raise KeyboardInterrupt

    def ignore_from_now(self) -> None:
        """For the clean-up after an interrupt."""
        self._shielded = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._shielded:
            self._pending = True
        else:
            self._deliver()

    def _deliver(self) -> None:
        self._requested = True
        if self._callback is not None:
            self._callback()
        else:
            raise KeyboardInterrupt
