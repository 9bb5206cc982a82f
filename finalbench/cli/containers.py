"""`--runtime`: which one was meant, what `auto` chooses and why, and the containers of `clean`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from finalbench.errors import FinalbenchError, UsageError

if TYPE_CHECKING:
    from finalbench.runtime.container import ContainerRuntime
    from finalbench.scenario import Scenario

RUNTIMES = ("auto", "container", "process", "endpoint")


def choose_runtime(
    runtime: str,
    scenario: Scenario,
    endpoints: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    pinned: bool,
) -> tuple[ContainerRuntime | None, str]:
    """The containers to use, None for processes, and one line that says what and why.

    Errors: `EnvironmentMissing` when containers are asked for and no engine answers.
    """
    from finalbench.runtime.server import COMMAND_VARIABLE

    if pinned and runtime != "container":
        raise UsageError("--pinned needs --runtime container")
    arms = [arm for arm in scenario.arms if arm not in endpoints]
    if not arms:
        return None, "endpoint: every arm has one"
    if runtime == "container":
        containers = _open(scenario, environment, pinned=pinned)
        return containers, f"container, as asked for ({containers.describe()})"
    if runtime != "auto":
        return None, "process, as asked for"
    if environment.get(COMMAND_VARIABLE):
        return None, f"process: {COMMAND_VARIABLE} says what runs the engine"
    try:
        containers = _open(scenario, environment, pinned=False)
        missing = containers.missing(arms)
    except FinalbenchError as error:
        return None, f"process: {error}"
    if missing:
        return None, f"process: no image {missing[0]} here (`make images` builds it)"
    return containers, f"container: {containers.describe()} answers and every image is here"


def sweep_containers(environment: Mapping[str, str], *, dry_run: bool) -> list[str]:
    """Containers whose harness is gone, removed unless `dry_run`; none when no engine answers."""
    from finalbench.runtime.container_engine import connect, orphaned, sweep_orphans

    try:
        client = connect(environment)
    except FinalbenchError:
        return []
    if dry_run:
        return [str(container.name) for container in orphaned(client)]
    return sweep_orphans(client)


def _open(scenario: Scenario, environment: Mapping[str, str], *, pinned: bool) -> ContainerRuntime:
    from finalbench.runtime.container import ContainerRuntime

    return ContainerRuntime.open(environment, devices=scenario.hardware.devices, pinned=pinned)
