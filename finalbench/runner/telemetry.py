"""Readings of the machine: GPU sensors while servers run, the rest between cells.

GPU sensors are read by a process of their own (`runtime.nvml`), so that samples fall inside the
timed windows and no timed stream waits for one. Where there is no GPU the reason is on record.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import psutil

from finalbench.record import TelemetryBatch, TelemetryRecord, packed
from finalbench.runner.state import utc_now

INTERVAL_MS = 50.0
Append = Callable[[TelemetryRecord | TelemetryBatch], None]


class Telemetry:
    """Sensors of one run. `watch` with each server's settings, `read` between cells, `stop`."""

    def __init__(self, append: Append, environment: Mapping[str, str]) -> None:
        self._append, self._environment = append, environment
        self._sampler: GpuSampler | None = None
        self._reason: str | None = None

    def watch(self, settings: Mapping[str, Any]) -> None:
        """Begin to sample the GPU that this server runs on."""
        self.stop()
        device = str(settings.get("device", ""))
        if device.startswith("cuda"):
            self._reason = None
            self._sampler = GpuSampler(gpu_of(device, self._environment))
        else:
            self._reason = f"no GPU: the server runs on {device or 'an unnamed device'}"

    def read(self) -> None:
        """Store what the sampler has seen so far, and one reading of the host."""
        if self._sampler is not None:
            self._store(self._sampler)
            self._reason = self._sampler.reason
        self._append(host_reading(self._reason))

    def stop(self) -> None:
        """End the sampler, its last samples stored."""
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.stop()
            self._store(sampler)
            sampler.close()

    def _store(self, sampler: GpuSampler) -> None:
        """All samples since the last time in one line: a card's sensors hardly change."""
        samples = list(sampler.take())
        if samples:
            self._append(packed(samples))


class GpuSampler:
    """A child process that samples one GPU into a file; nothing is read until `take`."""

    def __init__(self, device: str, *, interval_ms: float = INTERVAL_MS) -> None:
        self.reason: str | None = None
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._at = 0
        command = [sys.executable, "-m", "finalbench.runtime.nvml"]
        command += ["--device", device, "--interval-ms", str(interval_ms)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._file.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for the harness alone
        )

    def take(self) -> Iterator[TelemetryRecord]:
        """What was written since the last call, whole lines only."""
        data = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, self._at)
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            found = json.loads(line)
            if "reason" in found:
                self.reason = found["reason"]
                continue
            at = datetime.datetime.fromtimestamp(found["wall_s"], datetime.UTC)
            yield TelemetryRecord(
                utc=at.strftime("%Y-%m-%dT%H:%M:%SZ"), t_ns=found["t_ns"], values=found["values"]
            )
        if self.reason is None and self._process.poll() not in (None, 0, -signal.SIGTERM):
            self.reason = f"the sampler ended with code {self._process.returncode}"

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        self._file.close()


def gpu_of(device: str, environment: Mapping[str, str]) -> str:
    """NVML's name for a server's `cuda` or `cuda:1`: an index, or the UUID it was told to use."""
    _, _, text = device.partition(":")
    index = int(text) if text.isdigit() else 0
    visible = [v.strip() for v in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
    return visible[index] if index < len(visible) else str(index)


def host_reading(reason: str | None) -> TelemetryRecord:
    """One reading of the host. `reason` says why there is no GPU reading beside it."""
    values: dict[str, float | None] = {
        "load_1m": round(os.getloadavg()[0], 2),
        "mem_used_bytes": float(psutil.virtual_memory().used),
    }
    frequency = psutil.cpu_freq()
    if frequency is not None and frequency.current:
        values["cpu_clock_mhz"] = round(frequency.current, 1)
    return TelemetryRecord(
        utc=utc_now(), t_ns=time.monotonic_ns(), values=values, gpu_reason=reason
    )
