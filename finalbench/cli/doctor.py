"""What `doctor` looks at. Each check says what it found; FAIL only where `run` cannot work."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from finalbench.errors import FinalbenchError
from finalbench.provenance import list_gpus, usable_cores
from finalbench.runtime.process import choose_port
from finalbench.runtime.server import COMMAND_VARIABLE, vk_executable

_VARIABLES = (
    "FINALBENCH_RESULTS_DIR",
    COMMAND_VARIABLE,
    "DOCKER_HOST",
    "HF_HOME",
    "HF_ENDPOINT",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)
_SECRETS = ("HF_TOKEN", "HF_OIDC_RESOURCE")
_NEEDED_DISK_GB = 1.0
_CEILING_S = 0.5
CLIENT_STREAMS = (1, 64, 1024)
# Chunks/s that a client on two cores should take, and how late its stamps may then be at p99.
_FLOORS = {64: 20_000.0, 1024: 10_000.0}
_LATE_MS = 1.0


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `numbers` holds what a program would read."""

    name: str
    status: Literal["ok", "warn", "FAIL"]
    text: str
    numbers: dict[str, float] | None = None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def check_machine(
    environment: Mapping[str, str], results: Path, *, streams: tuple[int, ...] = CLIENT_STREAMS
) -> list[Check]:
    """All checks, in the order a run would need them. `streams`: where the client is timed."""
    return [
        _python(),
        *_engine(environment),
        _gpu(),
        _containers(),
        _disk(results),
        _port(),
        *_client(streams),
        _variables(environment),
    ]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    return Check("python", "ok" if good else "FAIL", f"{version}, {usable_cores()} cores")


def _engine(environment: Mapping[str, str]) -> list[Check]:
    try:
        executable = vk_executable(environment)
    except FinalbenchError as error:
        return [Check("engine", "FAIL", f"{error} ({error.hint})")]
    found = Check("engine", "ok", " ".join(executable))
    # Torch is asked about in a process of its own: the harness never imports it.
    code = (
        "import json, torch; print(json.dumps([torch.__version__, torch.cuda.is_available(), "
        "torch.get_num_threads()]))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
        )
        version, cuda, threads = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return [found, Check("torch", "warn", "not importable from this Python")]
    text = f"{version}, CUDA {'available' if cuda else 'not available'}, {threads} threads"
    return [found, Check("torch", "ok", text)]


def _gpu() -> Check:
    gpus = list_gpus()
    if not gpus:
        return Check("gpu", "warn", "none; scenarios for CUDA can be planned here, not run")
    names = ", ".join(f"{g.name} ({(g.memory_bytes or 0) / 1e9:.0f} GB)" for g in gpus)
    return Check("gpu", "ok", f"{names}, driver {gpus[0].driver}")


def _containers() -> Check:
    engine = next((name for name in ("docker", "podman") if shutil.which(name)), None)
    if engine is None:
        return Check("containers", "warn", "no docker or podman; --runtime process needs none")
    try:
        subprocess.run([engine, "info"], capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return Check("containers", "warn", f"{engine} is installed, its service does not answer")
    return Check("containers", "ok", f"{engine} answers")


def _disk(results: Path) -> Check:
    place = next(p for p in (results.resolve(), *results.resolve().parents) if p.exists())
    free = shutil.disk_usage(place).free / 1e9
    status = "ok" if free >= _NEEDED_DISK_GB else "FAIL"
    return Check("disk", status, f"{free:.1f} GB free for {results}", {"free_gb": round(free, 1)})


def _port() -> Check:
    try:
        return Check("port", "ok", f"127.0.0.1 gives free ports ({choose_port()})")
    except OSError as error:
        return Check("port", "FAIL", f"no port on 127.0.0.1: {error.strerror}")


def _client(streams: tuple[int, ...]) -> list[Check]:
    """How much the client itself takes, against a toy server on this machine."""
    return [_ceiling(count) for count in streams]


def _ceiling(streams: int) -> Check:
    from finalbench.client.ceiling import measure

    name = f"client x{streams}"
    try:
        found = asyncio.run(measure(streams=streams, seconds=_CEILING_S))
    except FinalbenchError as error:
        return Check(name, "warn", f"not measured: {error}")
    late, drain = found.added_p99_ms, found.burst_drain_ms
    text = f"{found.chunks_per_s:,.0f} chunks/s over {streams} streams"
    if late is not None:
        text += f"; at half of that {late:.2f} ms late at the 99th percentile"
    if drain is not None:
        text += f"; a burst of {found.burst_streams} drains in {drain:.1f} ms"
    if found.waited_share is not None:
        text += f"; it waited for a core {found.waited_share:.0%} of the time, {found.scheduling}"
    numbers = {k: float(v) for k, v in found.as_dict().items() if isinstance(v, float | int)}
    slow = found.chunks_per_s < _FLOORS.get(streams, 0.0)
    if slow or (late is not None and late > _LATE_MS):
        floor = f"{_FLOORS[streams]:,.0f} chunks/s and " if streams in _FLOORS else ""
        text += (
            f" (a quiet machine of two cores gives {floor}{_LATE_MS:g} ms; what else runs here?)"
        )
        return Check(name, "warn", text, numbers)
    return Check(name, "ok", text, numbers)


def _variables(environment: Mapping[str, str]) -> Check:
    shown = [f"{name}={environment[name]}" for name in _VARIABLES if name in environment]
    shown += [f"{name}=(set)" for name in _SECRETS if name in environment]
    return Check("environment", "ok", ", ".join(shown) or "nothing set that matters")
