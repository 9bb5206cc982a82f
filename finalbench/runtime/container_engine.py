"""The container engine (Docker, or Podman's socket): found, asked, and swept of what we left there.

Every container of ours carries the run it belongs to and the process that owns it, so that a killed
harness's containers can be told from those of one that still runs.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

import docker
import psutil
import requests
from docker import DockerClient
from docker.context import ContextAPI
from docker.errors import DockerException, NotFound
from docker.models.containers import Container

from finalbench.errors import EnvironmentMissing
from finalbench.runtime.container_images import reason_of

RUN_LABEL = "io.finalbench.run"
OWNER_LABEL = "io.finalbench.owner"
HOST_LABEL = "io.finalbench.host"
_TIMEOUT_S = 60
ENGINE_ERRORS = (DockerException, requests.RequestException, OSError)


def connect(environment: Mapping[str, str]) -> DockerClient:
    """The engine at DOCKER_HOST, at Docker's own place, or at Podman's.

    Errors: `EnvironmentMissing` when none answers, or the one that answers is on another machine.
    """
    places = [environment] if "DOCKER_HOST" in environment else _places(environment)
    first: Exception | None = None
    for place in places:
        try:
            _knock(place)
            client = docker.from_env(environment=dict(place), timeout=_TIMEOUT_S)
        except ENGINE_ERRORS as error:
            first = first or error
            continue
        if not client.api.base_url.startswith("http+docker:"):
            raise EnvironmentMissing(
                f"the container engine at {client.api.base_url} is on another machine, and a "
                "server's time must not include a network",
                hint="run there, or measure its server with --endpoint ARM=URL",
            )
        return client
    where = environment.get("DOCKER_HOST", "the usual sockets")
    raise EnvironmentMissing(
        f"no container engine answers at {where}: {_why(first)}",
        hint="start Docker, or set DOCKER_HOST to Podman's socket; `--runtime process` needs no "
        "container engine",
    ) from first


def _places(environment: Mapping[str, str]) -> list[Mapping[str, str]]:
    sockets = [Path("/run/podman/podman.sock")]
    if folder := environment.get("XDG_RUNTIME_DIR"):
        sockets.append(Path(folder) / "podman" / "podman.sock")
    podman = [dict(environment) | {"DOCKER_HOST": f"unix://{s}"} for s in sockets if s.exists()]
    return [environment, *podman]


def _knock(environment: Mapping[str, str]) -> None:
    """Errors: `OSError` when nobody listens on the socket; the SDK would leave its own one open."""
    host = environment.get("DOCKER_HOST")
    if host is None:
        context = ContextAPI.get_current_context()
        host = context.Host if context is not None else None
    if host is not None and host.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(host.removeprefix("unix://"))


def _why(error: Exception | None) -> str:
    """The last cause of a chain that says the same thing four times."""
    text = str(error)
    for known in ("No such file or directory", "Connection refused", "Permission denied"):
        if known in text:
            return known.lower()
    return " ".join(text.split())


def engine_name(client: DockerClient) -> str:
    """`Docker 28.2` or `Podman 4.3`: what the daemon says of itself."""
    facts = client.version()
    components = " ".join(str(part.get("Name")) for part in facts.get("Components") or [])
    name = "Podman" if "podman" in components.lower() else "Docker"
    return f"{name} {facts.get('Version', '?')}"


def owner_labels(run_id: str) -> dict[str, str]:
    """What marks a container as this process's, in this run."""
    return {RUN_LABEL: run_id, OWNER_LABEL: _owner(os.getpid()), HOST_LABEL: platform.node()}


def remove_run(client: DockerClient, run_id: str) -> list[str]:
    """Remove this process's containers of a run; returns their names."""
    mine = _owner(os.getpid())
    return [
        str(container.name)
        for container in _ours(client, f"{RUN_LABEL}={run_id}")
        if container.labels.get(OWNER_LABEL) == mine and remove(container)
    ]


def orphaned(client: DockerClient) -> list[Container]:
    """Our containers whose harness is gone; those of another machine are not ours to judge."""
    return [
        container
        for container in _ours(client, RUN_LABEL)
        if container.labels.get(HOST_LABEL) == platform.node()
        and not _alive(container.labels.get(OWNER_LABEL, ""))
    ]


def sweep_orphans(client: DockerClient) -> list[str]:
    """Remove them; returns their names."""
    return [str(container.name) for container in orphaned(client) if remove(container)]


def remove(container: Container) -> bool:
    """Kill and delete, with its anonymous volumes; False when it was gone or the engine is."""
    with contextlib.suppress(NotFound):
        try:
            container.remove(force=True, v=True)
        except ENGINE_ERRORS as error:
            # Somebody else is removing it at this moment.
            if "already in progress" not in reason_of(error):
                return False
        return True
    return False


def _ours(client: DockerClient, label: str) -> list[Container]:
    # `ignore_removed`: a container may go away between the list and the look at it.
    return client.containers.list(all=True, filters={"label": label}, ignore_removed=True)


def _owner(pid: int) -> str:
    """Process id and start: the number alone may belong to another program later."""
    return f"{pid}@{psutil.Process(pid).create_time():.2f}"


def _alive(owner: str) -> bool:
    pid, _, _ = owner.partition("@")
    try:
        return pid.isdigit() and _owner(int(pid)) == owner
    except psutil.Error:
        return False
