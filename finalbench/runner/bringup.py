"""A server of whichever kind the run's options ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finalbench.arms import Settings
from finalbench.runtime.server import LiveServer, Wanted, attach_endpoint, start_server

if TYPE_CHECKING:
    from finalbench.runtime.container import ContainerRuntime


@dataclass(frozen=True, slots=True)
class Starter:
    """`endpoints`: arms that somebody else serves. `containers` None: children of this process."""

    endpoints: Mapping[str, str]
    environment: Mapping[str, str]
    containers: ContainerRuntime | None
    run_id: str
    timeout_s: float

    def start(self, name: str, settings: Settings, log: Path) -> LiveServer:
        """A ready server of an arm. Errors: `ServerStartFailed`, `EnvironmentMissing`."""
        if name in self.endpoints:
            return attach_endpoint(self.endpoints[name], settings, timeout_s=self.timeout_s)
        if self.containers is not None:
            wanted = Wanted(name, self.run_id, log, self.timeout_s)
            return self.containers.start(settings, wanted)
        return start_server(
            settings, log=log, timeout_s=self.timeout_s, environment=self.environment
        )
