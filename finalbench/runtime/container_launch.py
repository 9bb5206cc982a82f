"""How a container of ours is made: what it may do, what it sees, and refusals in words.

No root, no capabilities, nothing writable but /tmp, the weights read-only, no calls home.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker import DockerClient
from docker.errors import APIError
from docker.models.containers import Container
from docker.types import Mount

from finalbench.arms import Settings, engine_of, model_folder
from finalbench.errors import EnvironmentMissing
from finalbench.runtime.container_engine import ENGINE_ERRORS, owner_labels, remove
from finalbench.runtime.container_gpu import device_requests
from finalbench.runtime.container_images import LocalImage, ServerImage, reason_of

HOST = "127.0.0.1"
INSIDE_PORT = 8000  # with a bridge network; on the host's network the port is chosen
_NOBODY = "65534:65534"
_PIDS = 4096  # threads count too
_TMP = "rw,nosuid,nodev,exec,size=2g,mode=1777"  # exec: kernels are compiled and loaded there
_ENVIRONMENT = {
    "HOME": "/tmp",
    "TRITON_CACHE_DIR": "/tmp/triton",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One container to be: `port` is the host's, None for a command that serves nothing."""

    spec: ServerImage
    image: LocalImage
    arm: str
    run_id: str
    command: Sequence[str]
    environment: Mapping[str, str]
    checkpoint: str | None
    uuids: Sequence[str]
    port: int | None


def launch(client: DockerClient, what: Launch) -> Container:
    """A started container. Errors: `EnvironmentMissing` when the engine refuses it."""
    name = f"finalbench-{what.run_id[-24:]}-{secrets.token_hex(4)}".lower()
    try:
        container = client.containers.create(
            what.image.id,
            list(what.command[1:]),
            entrypoint=list(what.command[:1]),
            name=name,
            labels=owner_labels(what.run_id),
            environment=_ENVIRONMENT | dict(what.environment) | what.spec.environment,
            user=what.image.user or _user(),
            init=True,  # reaps workers, and ends a server that has no handler for SIGTERM
            read_only=True,
            tmpfs={"/tmp": _TMP},
            working_dir="/tmp",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            pids_limit=_PIDS,
            shm_size=what.spec.shm,
            # We probe by ourselves; a check inside would take time from what is measured.
            healthcheck={"test": ["NONE"]},
            **_varying(what),
        )
        container.start()
        container.reload()  # its process id
        return container
    except ENGINE_ERRORS as error:
        _remove_named(client, name)
        raise EnvironmentMissing(f"{what.arm}: {_refusal(error)}", hint=_hint(error)) from error
    except BaseException:
        _remove_named(client, name)  # the engine may have made it before the interrupt came
        raise


def inside_path(settings: Settings) -> str | None:
    """The checkpoint, which has the same path inside as outside."""
    return None if settings.get("path") is None else str(Path(str(settings["path"])).absolute())


def shown_path(settings: Settings) -> str | None:
    """What must be shown inside: the checkpoint, or the shape's folder where a server reads one."""
    folder = model_folder(settings) if engine_of(settings).name != "vk" else None
    if folder is not None and Path(folder).exists():
        return str(Path(folder).absolute())
    return inside_path(settings)


def _varying(what: Launch) -> dict[str, Any]:
    spec = what.spec
    paths = [*spec.mounts, *_checkpoint_folder(what.checkpoint)]
    options: dict[str, Any] = {
        "network_mode": "none" if what.port is None else spec.network,
        "mounts": [Mount(target=p, source=p, type="bind", read_only=True) for p in paths],
        "device_requests": device_requests(what.uuids),
    }
    if what.port is not None and spec.network == "bridge":
        options["ports"] = {f"{INSIDE_PORT}/tcp": (HOST, what.port)}
    if spec.memory is not None:
        options |= {"mem_limit": spec.memory, "memswap_limit": spec.memory}
    return options


def _checkpoint_folder(path: str | None) -> list[str]:
    """What to mount: a snapshot in the Hub's cache is links into `blobs` beside it."""
    if path is None:
        return []
    folder = Path(path)
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        folder = folder.parent.parent
    return [str(folder)]


def _user() -> str:
    """Ours, so that a private checkpoint can be read; never root."""
    return f"{os.getuid()}:{os.getgid()}" if os.getuid() != 0 else _NOBODY


def _remove_named(client: DockerClient, name: str) -> None:
    with contextlib.suppress(*ENGINE_ERRORS):
        remove(client.containers.get(name))


def _refusal(error: Exception) -> str:
    text = reason_of(error)
    if "could not select device driver" in text:
        return f"the container engine has no access to GPUs: {text}"
    return f"the container cannot be started: {text}"


def _hint(error: Exception) -> str | None:
    if "could not select device driver" in reason_of(error):
        return "install the NVIDIA Container Toolkit, or use --runtime process"
    return None if isinstance(error, APIError) else "is the container engine still running?"
