"""Progress on stderr: a live bar on a terminal, one line per cell elsewhere, or only notes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from finalbench.metrics.timing import timing
from finalbench.record import RequestRecord


def decode_rate(record: RequestRecord) -> float | None:
    """Tokens per second after the first chunk, of one request."""
    seen = timing(record)
    tokens, ns = seen.decode_tokens, seen.decode_ns
    return tokens / ns * 1e9 if seen.valid and tokens and ns else None


class Notes:
    """Only what the user must know."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, *, total: int, done: int) -> None: ...

    def phase(self, text: str) -> None: ...

    def request(self, record: RequestRecord) -> None: ...

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)


class Lines(Notes):
    """For logs: a line when something else begins, with how far the run is."""

    def begin(self, *, total: int, done: int) -> None:
        self._total, self._done = total, done

    def phase(self, text: str) -> None:
        self._console.print(
            f"[{self._done}/{self._total}] {text}", markup=False, highlight=False, soft_wrap=True
        )

    def request(self, record: RequestRecord) -> None:
        self._done += record.status == "ok"


class Bar(Notes):
    """A live bar with the phase and the last request's rate."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description} {task.fields[rate]}", markup=False),
            console=console,
            transient=True,
        )
        self._task = self.progress.add_task("starting", total=None, rate="")

    def begin(self, *, total: int, done: int) -> None:
        self.progress.update(self._task, total=total, completed=done)

    def phase(self, text: str) -> None:
        self.progress.update(self._task, description=text, rate="")

    def request(self, record: RequestRecord) -> None:
        rate = decode_rate(record)
        self.progress.update(
            self._task,
            advance=1 if record.status == "ok" else 0,
            rate=f"{rate:.0f} tok/s" if rate else record.status,
        )


@contextmanager
def shown(*, quiet: bool, bar: bool) -> Generator[Notes]:
    """The display that fits the terminal and the flags."""
    console = Console(stderr=True)
    if quiet or not bar:
        yield Notes(console)
    elif console.is_terminal:
        display = Bar(console)
        with display.progress:
            yield display
    else:
        yield Lines(console)
