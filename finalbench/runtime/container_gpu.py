"""GPUs of a container: asked for by UUID, and proven from inside before any traffic.

A device request is a wish: Podman's API drops it without a word.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from docker.errors import APIError
from docker.models.containers import Container
from docker.types import DeviceRequest

from finalbench.errors import EnvironmentMissing
from finalbench.runtime.container_images import reason_of

_UUID = re.compile(r"\((?:UUID: )?((?:GPU|MIG)-[0-9a-f-]+)\)")


def host_uuids(environment: Mapping[str, str]) -> list[str]:
    """UUIDs of this machine's GPUs, in the driver's order, as CUDA_VISIBLE_DEVICES allows."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    found = [u for u in _UUID.findall(done.stdout) if u.startswith("GPU-")]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    chosen = []
    for part in (p.strip() for p in visible.split(",") if p.strip()):
        if part.isdigit() and int(part) < len(found):
            chosen.append(found[int(part)])
        chosen += [uuid for uuid in found if part.startswith("GPU-") and uuid.startswith(part)]
    return chosen


def choose(uuids: Sequence[str], count: int) -> list[str]:
    """The first `count` of them. Errors: `EnvironmentMissing`."""
    if len(uuids) < count:
        raise EnvironmentMissing(
            f"{count} GPU{'s' if count > 1 else ''} asked for, {len(uuids) or 'none'} here",
            hint="the driver's `nvidia-smi -L` must list them",
        )
    return list(uuids[:count])


def device_requests(uuids: Sequence[str]) -> list[DeviceRequest]:
    """What the engine is asked for."""
    if not uuids:
        return []
    capabilities = [["gpu", "compute", "utility"]]
    return [DeviceRequest(device_ids=list(uuids), capabilities=capabilities)]


def prove(container: Container, uuids: Sequence[str]) -> dict[str, Any] | None:
    """Ask the container's own `nvidia-smi` which GPUs it sees; None when none were asked for.

    Errors: `EnvironmentMissing` when it sees others than those asked for, or none.
    """
    if not uuids:
        return None
    try:
        code, output = container.exec_run(["nvidia-smi", "-L"])
    except APIError as error:
        code, output = 1, reason_of(error).encode()
    text = output.decode("utf-8", "replace")
    seen = _UUID.findall(text)
    if code != 0 or not set(uuids) <= set(seen):
        what = f"sees {len(seen)} other GPUs" if seen else "sees no GPU"
        raise EnvironmentMissing(
            f"the container {what}, although {len(uuids)} were asked for: {_first_line(text)}",
            hint="install the NVIDIA Container Toolkit; Podman's API ignores device requests, so "
            "there use --runtime process, or --endpoint with a container you start yourself",
        )
    # A digest tells cards apart and names none, as in the provenance.
    digests = [hashlib.sha256(uuid.encode()).hexdigest()[:12] for uuid in uuids]
    return {"source": "nvidia-smi inside the container", "uuid_digests": digests}


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no answer")
