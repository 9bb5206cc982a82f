"""What the run ran on: code, packages, machine. An allow-list; nothing else is ever recorded."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import psutil

from finalbench import __version__
from finalbench.scenario import Frozen

_PACKAGES = ("finalbench", "httpx2", "pydantic", "scipy", "vkengine", "torch", "transformers")
_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "FINALBENCH_RUNTIME",
    "HF_HUB_OFFLINE",
    "KMP_AFFINITY",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
)
# Peak memory bandwidth in GB/s by the vendor's data sheet; the first name found in the GPU's wins.
_BANDWIDTH_GB_S = (
    ("H200", 4800),
    ("B200", 8000),
    ("B300", 8000),
    ("H100 NVL", 3900),
    ("H100 PCIe", 2000),
    ("H100", 3350),
    ("H20", 4000),
    ("A100-SXM4-80GB", 2039),
    ("A100 80GB PCIe", 1935),
    ("A100", 1555),
    ("L40S", 864),
    ("L40", 864),
    ("L4", 300),
    ("A10G", 600),
    ("A10", 600),
    ("RTX 5090", 1792),
    ("RTX 4090", 1008),
    ("RTX 3090", 936),
    ("T4", 320),
)


class Gpu(Frozen):
    """One GPU as the driver reports it. `uuid_digest` tells cards apart and names none."""

    name: str
    uuid_digest: str
    memory_bytes: int | None
    driver: str | None


class HardwareFacts(Frozen):
    """The machine. Bandwidth is that of one device, in bytes per second, with its source."""

    cpu: str
    cores: int
    memory_bytes: int
    cache_bytes: int | None
    gpus: tuple[Gpu, ...]
    memory_bandwidth_bytes_s: float | None
    memory_bandwidth_source: str
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
    hardware: HardwareFacts
    environment: dict[str, str]
    loadavg_1m: float | None


def collect(environment: dict[str, str], *, device: str) -> Provenance:
    """Look at this machine. `device` (`cpu` or `cuda`) is the one measured on."""
    commit, dirty = _git(Path(__file__).parent)
    return Provenance(
        finalbench_version=__version__,
        git_commit=commit,
        git_dirty=dirty,
        python=platform.python_version(),
        os=f"{platform.system()} {platform.release()}",
        host=_short_digest(platform.node() + _read(Path("/etc/machine-id"))),
        packages=package_versions(),
        hardware=hardware(device=device),
        environment=_environment(environment),
        loadavg_1m=round(os.getloadavg()[0], 2),
    )


def hardware(*, device: str) -> HardwareFacts:
    """CPU, memory and GPUs; the bandwidth is null where no honest figure exists."""
    gpus = list_gpus()
    bandwidth, source = None, "not stated: on a CPU weights may stay in the cache"
    if device == "cuda" and gpus:
        found = [(n, g) for n, g in _BANDWIDTH_GB_S if n.lower() in gpus[0].name.lower()]
        source = f"not known for {gpus[0].name}"
        if found:
            bandwidth, source = found[0][1] * 1e9, f"data sheet of {found[0][0]}"
    governor = _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"))
    return HardwareFacts(
        cpu=_cpu_name(),
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        cache_bytes=_cache_bytes(),
        gpus=tuple(gpus),
        memory_bandwidth_bytes_s=bandwidth,
        memory_bandwidth_source=source,
        governor=governor or None,
    )


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def package_versions() -> dict[str, str]:
    """Installed versions of what the numbers depend on."""
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def list_gpus() -> list[Gpu]:
    """GPUs that `nvidia-smi` lists; none when there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "name,uuid,memory.total,driver_version"
    text = _output(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"])
    gpus = []
    for line in (text or "").splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4:
            memory = int(fields[2]) * 2**20 if fields[2].isdigit() else None
            gpus.append(
                Gpu(
                    name=fields[0],
                    uuid_digest=_short_digest(fields[1]),
                    memory_bytes=memory,
                    driver=fields[3],
                )
            )
    return gpus


def _environment(environment: dict[str, str]) -> dict[str, str]:
    kept = {k: environment[k] for k in _ENVIRONMENT if k in environment}
    if "FINALBENCH_VK" in environment:
        # Another engine command is another measurement; the path itself is nobody's business.
        kept["FINALBENCH_VK"] = _short_digest(environment["FINALBENCH_VK"])
    return kept


def _git(folder: Path) -> tuple[str | None, bool | None]:
    """Commit of the repository that tracks this very code, and whether tracked files differ.

    Null for an installed copy, also where its environment lies inside some other repository. The
    owner of the checkout does not matter: a container's root reads the folder of a user.
    """
    git = ["git", "-c", "safe.directory=*", "-C", str(folder)]
    if _output([*git, "ls-files", "--error-unmatch", Path(__file__).name]) is None:
        return None, None
    commit = _output([*git, "rev-parse", "HEAD"])
    if not commit:
        return None, None
    status = _output([*git, "status", "--porcelain", "--untracked-files=no"])
    return commit, bool(status) if status is not None else None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _cache_bytes() -> int | None:
    """Size of the largest CPU cache, bytes."""
    sizes = []
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KM])", _read(index))
        if found:
            sizes.append(int(found[1]) * (2**10 if found[2] == "K" else 2**20))
    return max(sizes, default=None)


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
