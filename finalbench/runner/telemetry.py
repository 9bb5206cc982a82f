"""Readings of the machine between requests; what a sensor does not give is left out."""

from __future__ import annotations

import os
import subprocess
import time

import psutil

from finalbench.record import TelemetryRecord
from finalbench.runner.state import utc_now

_GPU_QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.used"
_GPU_KEYS = (
    ("gpu_sm_clock_mhz", 1.0),
    ("gpu_mem_clock_mhz", 1.0),
    ("gpu_power_w", 1.0),
    ("gpu_temp_c", 1.0),
    ("gpu_mem_bytes", float(2**20)),
)


def reading(*, gpu: bool) -> TelemetryRecord:
    """One reading. With `gpu`, the first GPU's sensors too (it costs some ten milliseconds)."""
    values: dict[str, float | None] = {
        "load_1m": round(os.getloadavg()[0], 2),
        "mem_used_bytes": float(psutil.virtual_memory().used),
    }
    frequency = psutil.cpu_freq()
    if frequency is not None and frequency.current:
        values["cpu_clock_mhz"] = round(frequency.current, 1)
    if gpu:
        values |= _gpu()
    return TelemetryRecord(utc=utc_now(), t_ns=time.monotonic_ns(), values=values)


def _gpu() -> dict[str, float | None]:
    command = [
        "nvidia-smi",
        "-i",
        "0",
        f"--query-gpu={_GPU_QUERY}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values: dict[str, float | None] = {}
    for (key, scale), text in zip(_GPU_KEYS, done.stdout.split(","), strict=False):
        try:
            values[key] = float(text) * scale
        except ValueError:
            values[key] = None  # the driver says "[N/A]"
    return values
