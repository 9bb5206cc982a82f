"""What `clean` does: end orphaned servers, delete unfinished runs and stray temporary files."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import psutil

from finalbench.cli.containers import sweep_containers
from finalbench.errors import FinalbenchError
from finalbench.record import load_run
from finalbench.runner.state import CUT
from finalbench.runtime.process import OWNER_VARIABLE


def sweep(
    results: Path, environment: Mapping[str, str], *, runs: bool, dry_run: bool
) -> dict[str, list[str]]:
    """Returns what was (or would be) ended and deleted."""
    containers = sweep_containers(environment, dry_run=dry_run)
    processes = [str(process.pid) for process in orphans()]
    if not dry_run:
        for pid in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(int(pid)).kill()
    folders = _unfinished(results) if runs else []
    temporary = sorted(results.glob("*/*.tmp"))
    if not dry_run:
        for path in folders:
            shutil.rmtree(path)
        for path in temporary:
            path.unlink(missing_ok=True)
    return {
        "processes": processes,
        "containers": containers,
        "runs": [str(path) for path in folders],
        "files": [str(path) for path in temporary],
    }


def orphans() -> list[psutil.Process]:
    """Our servers whose harness is gone: they carry its process id in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            owner = process.environ().get(OWNER_VARIABLE)
        except (psutil.Error, OSError):
            continue
        if owner and owner.isdigit() and not _harness_alive(int(owner)):
            found.append(process)
    return found


def _harness_alive(pid: int) -> bool:
    """Alive, and not another program that got the same number later."""
    try:
        return "finalbench" in " ".join(psutil.Process(pid).cmdline()) or psutil.Process(
            pid
        ).name().startswith(("python", "pytest"))
    except psutil.Error:
        return False


def _unfinished(results: Path) -> list[Path]:
    folders = []
    for path in sorted(results.glob("*/run.json")):
        try:
            run = load_run(path.parent).run
        except FinalbenchError:
            continue
        if run.status in CUT:
            folders.append(path.parent)
    return folders
