"""The record of one server's life, from its start to its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from finalbench.arms import ENGINES, arm
from finalbench.client.scrape import Scrape, fetch, flush_cache
from finalbench.errors import EnvironmentMissing
from finalbench.record import CounterWindow, ServerRecord
from finalbench.runner.clean import Cleaner
from finalbench.runner.windows import GENERATED, PREFIX, count_window, prefix_total
from finalbench.runtime.asking import asking
from finalbench.runtime.ready import ServerFailed
from finalbench.runtime.server import LiveServer, ServerStartFailed

_SETTLE_S, _SETTLE_POLL_S = 2.0, 0.05

#: Counters, settings, and what was wrong.
_Look = tuple[dict[str, float] | None, dict[str, Any] | None, str | None]


@dataclass
class ServerWatch:
    """Identity of a server process, and what was read from it before and after its cells."""

    server_id: str
    server_key: str
    arm: str
    block: int
    roll: int
    order_index: int
    purpose: Literal["measure", "score"]
    cleaner: Cleaner
    _server: LiveServer | None = field(default=None, init=False)
    _before: dict[str, float] | None = field(default=None, init=False)
    _windows: list[CounterWindow] = field(default_factory=list, init=False)
    _last: _Look | None = field(default=None, init=False)

    def began(self, server: LiveServer) -> None:
        """Take the counters before the first request."""
        self._server = server
        self._before = self._renamed(_counters(server))

    @contextlib.contextmanager
    def counting(self, cell_id: str | None) -> Generator[None]:
        """Counters over what is done inside: of the prefix cache, and of drafts where the server
        has none per request.

        None counts nothing (a warm-up). Two scrapes, both outside of every timed request.
        """
        before = self._scrape() if cell_id is not None else None
        yield
        if before is None or cell_id is None or self._server is None or self._server.died():
            return
        engine = ENGINES[arm(self.arm).engine]
        by_window = engine.counters == "window"
        window = count_window(
            cell_id,
            before,
            self._settled() if by_window else self._scrape(),
            drafts=by_window,
            names=engine.counter_names,
        )
        if window is not None:
            self._windows.append(window)

    def empty_cache(self) -> None:
        """So that a cell meets what it plans, and nothing that an earlier one left."""
        scrape = self._scrape()
        if scrape is None or self._server is None:
            return
        engine = ENGINES[arm(self.arm).engine]
        if not any(prefix_total(scrape, name, engine.counter_names) for name in PREFIX):
            return  # nothing was ever looked up: it has no cache, or an empty one
        with (
            asking(self._server.base_url) as client,
            contextlib.suppress(EnvironmentMissing),  # the rules say what that led to
        ):
            flush_cache(client, self._server.base_url, path=engine.flush)

    def _renamed(self, counters: dict[str, float] | None) -> dict[str, float] | None:
        """Counters under vLLM's names, which the rules know."""
        names = ENGINES[arm(self.arm).engine].counter_names
        return counters and {names.get(name, name): value for name, value in counters.items()}

    def _scrape(self) -> Scrape | None:
        return None if self._server is None else _scrape(self._server)

    def _settled(self) -> Scrape | None:
        """A scrape whose token count no longer moves: servers add up a moment after they send."""
        end = time.monotonic() + _SETTLE_S
        last = self._scrape()
        while last is not None and time.monotonic() < end:
            time.sleep(_SETTLE_POLL_S)
            now = self._scrape()
            if now is None or now.total(GENERATED) == last.total(GENERATED):
                return now or last
            last = now
        return last

    def measured(self) -> None:
        """Read the server a last time; what it serves from now on belongs to no measurement."""
        server = self._server
        if server is None:
            raise ValueError("measured: the server never began")
        error = server.died()
        if error is None:
            after, settings_after, error = _last_look(server)
            self._last = (self._renamed(after), settings_after, error)
        else:
            self._last = (None, None, error)

    def close(self) -> ServerRecord:
        """Read the server a last time, unless that was done, end it, and tell its life."""
        server = self._server
        if server is None:
            raise ValueError("close: the server never began")
        if self._last is None:
            self.measured()
        after, settings_after, error = self._last or (None, None, None)
        error = error or server.died()
        code = server.stop()
        self.cleaner.log(server.log)
        proof, reason = _gpu_proof(server)
        return ServerRecord(
            **self._identity(),
            runtime=server.runtime,
            command=self.cleaner.command(server.command),
            image_digest=server.image_digest,
            nonce=server.nonce,
            pid=server.pid,
            base_url=server.base_url,
            settings=self.cleaner.document(server.settings),
            settings_after=self.cleaner.document(settings_after),
            start_seconds=server.start_seconds,
            gpu_proof=proof,
            gpu_proof_reason=reason,
            exit_code=code,
            log=f"logs/{server.log.name}" if server.log else None,
            counters_before=self._before,
            counters_after=after,
            windows=tuple(self._windows),
            error=self.cleaner.text(error),
        )

    def failed(self, error: ServerStartFailed, log: Path) -> ServerRecord:
        """The record of a server that never became ready."""
        self.cleaner.log(log)
        return ServerRecord(
            **self._identity(),
            runtime=error.runtime,
            command=self.cleaner.command(error.command),
            nonce="",
            pid=None,
            base_url="",
            settings=None,
            settings_after=None,
            start_seconds=None,
            gpu_proof=None,
            gpu_proof_reason="the server never became ready",
            exit_code=error.exit_code_of_server,
            log=f"logs/{log.name}",
            counters_before=None,
            counters_after=None,
            error=self.cleaner.text(str(error)),
        )

    def _identity(self) -> dict[str, Any]:
        return {
            "server_id": self.server_id,
            "server_key": self.server_key,
            "arm": self.arm,
            "block": self.block,
            "roll": self.roll,
            "order_index": self.order_index,
            "purpose": self.purpose,
        }


def _scrape(server: LiveServer) -> Scrape | None:
    with asking(server.base_url) as client:
        try:
            return fetch(client, server.base_url)
        except EnvironmentMissing:
            return None


def _counters(server: LiveServer) -> dict[str, float] | None:
    found = _scrape(server)
    return found.counters() if found is not None else None


def _last_look(server: LiveServer) -> _Look:
    try:
        with asking(server.base_url) as client:
            settings = server.reread(client)
    except ServerFailed as failure:
        return _counters(server), None, str(failure)
    changed = settings.get("nonce") != server.settings.get("nonce")
    return (
        _counters(server),
        settings,
        "the server was replaced: its nonce changed" if changed else None,
    )


def _gpu_proof(server: LiveServer) -> tuple[dict[str, Any] | None, str | None]:
    device = str(server.settings.get("device", ""))
    if not device.startswith("cuda"):
        return None, f"the server runs on {device or 'an unnamed device'}"
    return (server.gpu_proof or {}) | {
        "device": device,
        "device_name": server.settings.get("device_name"),
        "source": (server.gpu_proof or {}).get("source", "/v1/settings"),
    }, None
