"""What a run tells while it runs. The default says nothing."""

from __future__ import annotations

from typing import Protocol

from finalbench.record import RequestRecord


class Progress(Protocol):
    """Called by the runner in order; implementations only show."""

    def begin(self, *, total: int, done: int) -> None:
        """`total` measured requests are planned, `done` of them are on disk already."""

    def phase(self, text: str) -> None:
        """What happens now."""

    def request(self, record: RequestRecord) -> None:
        """One request ended."""

    def note(self, text: str) -> None:
        """Something the user must know: a failure, a resume."""


class Silent:
    """Shows nothing."""

    def begin(self, *, total: int, done: int) -> None: ...

    def phase(self, text: str) -> None: ...

    def request(self, record: RequestRecord) -> None: ...

    def note(self, text: str) -> None: ...
