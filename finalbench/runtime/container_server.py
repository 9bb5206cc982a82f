"""One container: watched, its log kept, its end told in words, nothing of it left."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

from docker.errors import NotFound
from docker.models.containers import Container

from finalbench.runtime.container_engine import ENGINE_ERRORS, remove
from finalbench.runtime.container_exit import describe_container_exit
from finalbench.runtime.container_images import reason_of
from finalbench.runtime.process import last_lines


class ContainerServer:
    """One container; `stop` is idempotent and leaves nothing of it behind."""

    def __init__(self, container: Container, log: Path, memory: str | None) -> None:
        self.log = log
        self._container = container
        self._memory = memory
        self._state: dict[str, Any] | None = None
        self._lost: str | None = None
        self._reader = threading.Thread(target=self._copy_log, daemon=True)
        self._reader.start()

    @property
    def container(self) -> Container:
        return self._container

    @property
    def pid(self) -> int | None:
        """The process id on the host, as the engine gives it."""
        state = (self._container.attrs or {}).get("State") or {}
        return int(state["Pid"]) if state.get("Pid") else None

    def exit_code(self) -> int | None:
        """None while it runs, or when nobody can say (see `death`)."""
        if self._state is None:
            self._look()
        return None if self._state is None else int(self._state.get("ExitCode", 0))

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None when it still runs after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while (code := self.exit_code()) is None and self._lost is None:
            if time.monotonic() > end:
                return None
            time.sleep(0.1)
        return code

    def death(self) -> str | None:
        """Why it no longer runs, in words with its last lines; None while it does."""
        self.exit_code()
        if self._state is None:
            return self._lost
        self._reader.join(2)
        lines = last_lines(self.log)
        told = describe_container_exit(self._state, self._memory)
        return f"the server ended ({told}); its last lines: {' | '.join(lines) or 'none'}"

    def stop(self, *, grace_s: float = 10.0) -> int | None:
        """SIGTERM, SIGKILL after `grace_s`, then delete; returns the exit code."""
        with contextlib.suppress(*ENGINE_ERRORS):
            if self.exit_code() is None:
                self._container.stop(timeout=int(grace_s))
                self._look()
        self._reader.join(2)
        remove(self._container)
        return self.exit_code() if self._state else None

    def _look(self) -> None:
        try:
            self._container.reload()
        except NotFound:
            self._lost = "the container is gone: somebody removed it"
            return
        except ENGINE_ERRORS as error:
            self._lost = f"the container engine no longer answers: {reason_of(error)}"
            return
        self._lost = None
        state = (self._container.attrs or {}).get("State") or {}
        if state.get("Status") in ("exited", "dead"):
            self._state = state

    def _copy_log(self) -> None:
        with contextlib.suppress(*ENGINE_ERRORS), self.log.open("ab", buffering=0) as file:
            stream = self._container.logs(stream=True, follow=True)
            with contextlib.closing(stream):
                for chunk in stream:
                    file.write(chunk)
