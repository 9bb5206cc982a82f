"""The record of one server's life, from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx2

from finalbench.client.scrape import fetch
from finalbench.errors import EnvironmentMissing
from finalbench.record import ServerRecord
from finalbench.runtime.ready import ServerFailed, read_settings
from finalbench.runtime.server import LiveServer, ServerStartFailed


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
    _server: LiveServer | None = field(default=None, init=False)
    _before: dict[str, float] | None = field(default=None, init=False)

    def began(self, server: LiveServer) -> None:
        """Take the counters before the first request."""
        self._server = server
        self._before = _counters(server)

    def close(self) -> ServerRecord:
        """Read the server a last time, end it, and tell its life."""
        server = self._server
        if server is None:
            raise ValueError("close: the server never began")
        error = server.died()
        after, settings_after = None, None
        if error is None:
            after, settings_after, error = _last_look(server)
        code = server.stop()
        proof, reason = _gpu_proof(server)
        return ServerRecord(
            **self._identity(),
            runtime=server.runtime,
            command=server.command,
            image_digest=server.image_digest,
            nonce=server.nonce,
            pid=server.pid,
            base_url=server.base_url,
            settings=server.settings,
            settings_after=settings_after,
            start_seconds=server.start_seconds,
            gpu_proof=proof,
            gpu_proof_reason=reason,
            exit_code=code,
            log=f"logs/{server.log.name}" if server.log else None,
            counters_before=self._before,
            counters_after=after,
            error=error,
        )

    def failed(self, error: ServerStartFailed, log: Path) -> ServerRecord:
        """The record of a server that never became ready."""
        return ServerRecord(
            **self._identity(),
            runtime=error.runtime,
            command=error.command,
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
            error=str(error),
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


def _counters(server: LiveServer) -> dict[str, float] | None:
    with httpx2.Client(timeout=5.0, trust_env=False) as client:
        try:
            found = fetch(client, server.base_url)
        except EnvironmentMissing:
            return None
    return found.counters() if found is not None else None


def _last_look(
    server: LiveServer,
) -> tuple[dict[str, float] | None, dict[str, Any] | None, str | None]:
    try:
        with httpx2.Client(base_url=server.base_url, timeout=5.0, trust_env=False) as client:
            settings = read_settings(client)
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
