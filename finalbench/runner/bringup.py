"""A server of whichever kind the run's options ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finalbench.arms import Settings
from finalbench.errors import EnvironmentMissing
from finalbench.record import Plan, Run
from finalbench.runtime.server import LiveServer, Wanted, attach_endpoint, start_server

if TYPE_CHECKING:
    from finalbench.runtime.container import ContainerRuntime


@dataclass(frozen=True, slots=True)
class Starter:
    """`endpoints`: arms that somebody else serves. `containers` None: children of this process."""

    run: Run
    endpoints: Mapping[str, str]
    environment: Mapping[str, str]
    containers: ContainerRuntime | None

    def start(self, name: str, settings: Settings, log: Path) -> LiveServer:
        """A ready server of an arm. Errors: `ServerStartFailed`, `EnvironmentMissing`."""
        timeout_s = self.run.scenario.measure.start_timeout_s
        if name in self.endpoints:
            return attach_endpoint(self.endpoints[name], settings, timeout_s=timeout_s)
        if self.containers is not None:
            wanted = Wanted(name, self.run.run_id, log, timeout_s)
            return self.containers.start(settings, wanted)
        return start_server(settings, log=log, timeout_s=timeout_s, environment=self.environment)


def require_drafts(arm: str, server: LiveServer, plan: Plan) -> None:
    """Before anything is measured: a server that says how it can draft must do as the plan wants.

    Errors: `EnvironmentMissing`, with the server's reason.
    """
    able = server.settings.get("draft_methods")
    if able is None:  # another engine, whose drafts are settings of its start
        return
    wanted = sorted({c.draft.method for c in plan.cells if c.arm == arm} - set(able))
    if wanted:
        refused = server.settings.get("draft_refused") or {}
        why = refused.get(wanted[0], f"it drafts with {', '.join(able)}")
        raise EnvironmentMissing(
            f"{arm}: cannot draft with {wanted[0]}: {why}",
            hint="to measure without such drafts, leave them out of axes.draft and base.draft",
        )
