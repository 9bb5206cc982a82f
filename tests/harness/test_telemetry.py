"""GPU sensors: read by a process of their own, in the clock of the requests; or null, and why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from finalbench.record import TelemetryRecord
from finalbench.runner.telemetry import GpuSampler, Telemetry, gpu_of

# A driver with one card that lacks an energy counter.
FAKE = """
import os
class NVMLError(Exception): pass
NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
class Box:
    used, gpu = 7 * 2**30, 93
def nvmlInit():
    if os.environ.get("FAKE_NVML") == "absent": raise NVMLError("Driver Not Loaded")
def nvmlDeviceGetHandleByIndex(index):
    if index > 1: raise NVMLError("Invalid Argument")
    return index
def nvmlDeviceGetHandleByUUID(uuid): return 0
def nvmlDeviceGetClockInfo(gpu, kind): return 1980 if kind == 1 else 3201
def nvmlDeviceGetPowerUsage(gpu): return 412_500
def nvmlDeviceGetTotalEnergyConsumption(gpu): raise NVMLError("Not Supported")
def nvmlDeviceGetTemperature(gpu, sensor): return 41 + gpu
def nvmlDeviceGetMemoryInfo(gpu): return Box
def nvmlDeviceGetUtilizationRates(gpu): return Box
def nvmlDeviceGetCurrentClocksThrottleReasons(gpu): return 4
def nvmlDeviceGetComputeRunningProcesses(gpu): return [1]
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text(FAKE)
    known = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), known])))


def wait_for(found: list[TelemetryRecord], sampler: GpuSampler, count: int) -> None:
    until = time.monotonic() + 20.0
    while len(found) < count and sampler.reason is None and time.monotonic() < until:
        found += sampler.take()
        time.sleep(0.02)


@pytest.mark.usefixtures("driver")
def test_samples_carry_every_sensor_and_the_monotonic_clock() -> None:
    sampler, found = GpuSampler("1", interval_ms=5.0), []
    begun = time.monotonic_ns()
    wait_for(found, sampler, 5)
    ended = time.monotonic_ns()
    sampler.stop()
    sampler.close()
    assert sampler.reason is None
    assert len(found) >= 5
    assert found[0].values == {
        "gpu_sm_clock_mhz": 1980.0,
        "gpu_mem_clock_mhz": 3201.0,
        "gpu_power_w": 412.5,
        "gpu_energy_j": None,  # null: this card has no such counter
        "gpu_temp_c": 42.0,
        "gpu_mem_bytes": 7.0 * 2**30,
        "gpu_busy_share": 0.93,
        "gpu_clock_reasons": 4.0,
        "gpu_processes": 1.0,
    }
    times = [record.t_ns for record in found]
    assert times == sorted(times)
    assert begun < times[0] < times[-1] < ended
    assert all(b - a >= 4_000_000 for a, b in pairwise(times))


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("device", "state", "reason"),
    [("0", "absent", "NVML: Driver Not Loaded"), ("5", "", "NVML: Invalid Argument")],
)
def test_no_sensor_is_a_reason(
    device: str, state: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NVML", state)
    sampler, found = GpuSampler(device), []
    wait_for(found, sampler, 1)
    sampler.stop()
    sampler.close()
    assert (found, sampler.reason) == ([], reason)


@pytest.mark.usefixtures("driver")
def test_a_run_stores_samples_and_the_host_beside_them() -> None:
    stored: list[TelemetryRecord] = []
    telemetry = Telemetry(stored.append, {})
    telemetry.watch({"device": "cuda:0"})
    until = time.monotonic() + 20.0
    while not any("gpu_power_w" in r.values for r in stored) and time.monotonic() < until:
        telemetry.read()
        time.sleep(0.05)
    telemetry.stop()
    assert any(r.values.get("gpu_temp_c") == 41.0 for r in stored)
    hosts = [r for r in stored if "load_1m" in r.values]
    assert hosts and all(r.gpu_reason is None for r in hosts)


def test_without_a_gpu_the_reason_is_on_record() -> None:
    stored: list[TelemetryRecord] = []
    telemetry = Telemetry(stored.append, {})
    telemetry.watch({"device": "cpu"})
    telemetry.read()
    telemetry.stop()
    (only,) = stored
    assert only.gpu_reason == "no GPU: the server runs on cpu"
    assert not any(name.startswith("gpu") for name in only.values)


@pytest.mark.usefixtures("driver")
def test_the_sampler_ends_with_its_parent(tmp_path: Path) -> None:
    """A harness that is killed leaves no sampler behind."""
    code = (
        "import sys, time\n"
        "from finalbench.runner.telemetry import GpuSampler\n"
        "sampler = GpuSampler('0', interval_ms=5.0)\n"
        "print(sampler._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 20.0
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        if "Z" in Path(f"/proc/{child}/stat").read_text().split(") ")[1][:1]:
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_which_card_a_server_runs_on() -> None:
    assert gpu_of("cuda", {}) == "0"
    assert gpu_of("cuda:1", {}) == "1"
    assert gpu_of("cuda:1", {"CUDA_VISIBLE_DEVICES": "3, 5"}) == "5"
    assert gpu_of("cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-ab12"}) == "GPU-ab12"
