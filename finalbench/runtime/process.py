"""A server as a child process in a process group of its own, and its certain end.

The child dies with the harness even when the harness is killed, where the kernel offers it (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from finalbench.errors import EnvironmentMissing

OWNER_VARIABLE = "FINALBENCH_OWNER_PID"  # marks our servers for `clean`
_PR_SET_PDEATHSIG = 1
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


def choose_port(host: str = "127.0.0.1") -> int:
    """A port that is free now; whoever takes it before the server does makes the start fail."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """One running child; `stop` is idempotent and leaves nothing of the group behind."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.log = log
        self._popen = popen

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        listens: bool = False,
    ) -> ServerProcess:
        """Start `command` with its output in `log`; `listens`: `say` reaches its standard input.

        Errors: `EnvironmentMissing`.
        """
        popen: subprocess.Popen[bytes] | None = None
        try:
            with log.open("ab") as output, _signals_after_the_fork():
                try:
                    popen = subprocess.Popen(
                        list(command),
                        stdin=subprocess.PIPE if listens else subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=dict(environment) | {OWNER_VARIABLE: str(os.getpid())},
                        start_new_session=True,
                        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
                    )
                except OSError as error:
                    raise EnvironmentMissing(
                        f"cannot start {command[0]!r}: {error.strerror or error}",
                        hint="install the engine: pip install -e engine",
                    ) from error
        except BaseException:
            if popen is not None:  # a signal that was held back until the child was there
                cls(popen, log).stop(grace_s=1.0)
            raise
        return cls(popen, log)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self._popen.poll()

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None when it still runs after `timeout_s`."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def say(self, line: str) -> None:
        """A line to its standard input. Errors: `BrokenPipeError` when it has ended."""
        if self._popen.stdin is None:
            raise ValueError("say: it was not started to listen")
        self._popen.stdin.write(line.encode() + b"\n")
        self._popen.stdin.flush()

    def death(self) -> str | None:
        """In words with its last lines, why it no longer runs; None while it does."""
        code = self.exit_code()
        return None if code is None else death_notice(code, self.log)

    def stop(self, *, grace_s: float = 8.0) -> int | None:
        """SIGTERM to the group, SIGKILL after `grace_s`; returns the exit code."""
        if self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.close()
        if self._popen.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace_s)
        # The group may outlive its leader: workers that ignore SIGTERM, or were forked late.
        self._signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(10)
        return self._popen.poll()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)


def last_lines(log: Path, count: int = 5) -> list[str]:
    """The last non-empty lines of a log, read from its end."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 8192))
        text = file.read().decode("utf-8", "replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def describe_exit(code: int) -> str:
    """`exit code 3`, or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def death_notice(code: int, log: Path) -> str:
    """`the server ended (exit code 3); its last lines: ...`."""
    lines = last_lines(log)
    tail = " | ".join(lines) if lines else "none"
    return f"the server ended ({describe_exit(code)}); its last lines: {tail}"


def wait_gone(pid: int, timeout_s: float) -> bool:
    """Whether a process group is empty within `timeout_s`."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@contextlib.contextmanager
def _signals_after_the_fork() -> Generator[None]:
    """Hold signals back while a child is made: Python drops what is raised in its fork hooks.

    Handlers, not the thread's mask: a blocked signal goes to another thread, and its handler runs
    in this one all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
        return
    held: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _INTERRUPTS}
    # One that Python did not set could not be put back.
    before = {number: handler for number, handler in handlers.items() if handler is not None}
    for number in before:
        signal.signal(number, lambda received, _frame: held.append(received))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
