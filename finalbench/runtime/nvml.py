"""Reads one GPU's sensors at a steady pace, in a process of its own: no timed stream waits for it.

    python -m finalbench.runtime.nvml --device 0 --interval-ms 50

Writes one JSON line a reading to stdout, `t_ns` from the monotonic clock that all processes of a
machine share, or one line `{"reason": ...}` and ends. Ends with its parent.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

Values = dict[str, float | None]


class NoSensor(Exception):
    """Why this machine's GPU cannot be read."""


class GpuSensor:
    """One GPU by its NVML index or UUID. NoSensor when it cannot be read at all."""

    def __init__(self, device: str) -> None:
        try:
            import pynvml
        except ImportError:
            raise NoSensor(
                "nvidia-ml-py is not installed (`pip install finalbench[gpu]`)"
            ) from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            if device.isdigit():
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(int(device))
            else:
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(device)
        except pynvml.NVMLError as error:
            raise NoSensor(f"NVML: {error}") from None

    def read(self) -> Values:
        """Every sensor the device has; None where it has none."""
        nvml, gpu = self._nvml, self._handle
        reads: dict[str, Callable[[], float]] = {
            "gpu_sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "gpu_mem_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            "gpu_energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
            "gpu_temp_c": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "gpu_mem_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
            "gpu_busy_share": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 1e2,
            "gpu_clock_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
            "gpu_processes": lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(gpu)),
        }
        return {name: self._value(read) for name, read in reads.items()}

    def _value(self, read: Callable[[], float]) -> float | None:
        try:
            return float(read())
        except self._nvml.NVMLError:
            return None  # this device, or this user, has no such sensor


def readings(sensor: GpuSensor, interval_s: float, parent: int) -> Iterator[dict[str, object]]:
    """Forever, or until the parent is gone."""
    due = time.monotonic()
    while os.getppid() == parent:
        at = time.monotonic_ns()
        yield {"t_ns": at, "wall_s": time.time(), "values": sensor.read()}
        due = max(due + interval_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def main(argv: list[str] | None = None) -> int:
    """Writes readings until ended."""
    parser = argparse.ArgumentParser(prog="finalbench.runtime.nvml")
    parser.add_argument("--device", default="0")
    parser.add_argument("--interval-ms", type=float, default=50.0)
    options = parser.parse_args(argv)
    parent = os.getppid()
    try:
        sensor = GpuSensor(options.device)
    except NoSensor as error:
        sys.stdout.write(json.dumps({"reason": str(error)}) + "\n")
        return 0
    with suppress(KeyboardInterrupt, BrokenPipeError):
        for reading in readings(sensor, options.interval_ms / 1e3, parent):
            sys.stdout.write(json.dumps(reading) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
