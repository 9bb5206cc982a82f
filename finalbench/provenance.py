"""What the run ran on: code, packages, machine. An allow-list; nothing else is ever recorded."""

from __future__ import annotations

from finalbench.scenario import Frozen


class Gpu(Frozen):
    """One GPU as the driver reports it; sizes in bytes, clocks in MHz."""

    name: str
    uuid_digest: str
    memory_bytes: int | None
    driver: str | None


class Hardware(Frozen):
    """The machine. Bandwidth in bytes per second, with where the figure comes from."""

    cpu: str
    cores: int
    memory_bytes: int
    cache_bytes: int | None
    gpus: tuple[Gpu, ...]
    memory_bandwidth_bytes_s: float | None
    memory_bandwidth_source: str | None
    governor: str | None


class Provenance(Frozen):
    """Circumstances of a run. `host` is a digest: it tells machines apart and names none."""

    finalbench_version: str
    git_commit: str | None
    git_dirty: bool | None
    python: str
    os: str
    host: str
    packages: dict[str, str]
    hardware: Hardware
    environment: dict[str, str]
    loadavg_1m: float | None
