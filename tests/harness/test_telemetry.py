"""GPU sensors: read by a process of their own, in the clock of the requests; or null, and why."""

from __future__ import annotations

import datetime
import itertools
import os
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_records import a_run

from finalbench.errors import BundleBroken
from finalbench.record import RunWriter, TelemetryBatch, TelemetryRecord, load_run, packed
from finalbench.record.telemetry import unpacked
from finalbench.runner.telemetry import GpuSampler, Telemetry, gpu_of

EPOCH = datetime.datetime(2026, 12, 1, 5, 0, 0, tzinfo=datetime.UTC)
UTC = "%Y-%m-%dT%H:%M:%SZ"

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
    stored: list[TelemetryRecord | TelemetryBatch] = []
    telemetry = Telemetry(stored.append, {})
    telemetry.watch({"device": "cuda:0"})
    until = time.monotonic() + 20.0
    while not any(isinstance(r, TelemetryBatch) for r in stored) and time.monotonic() < until:
        telemetry.read()
        time.sleep(0.05)
    telemetry.stop()
    batches = [r for r in stored if isinstance(r, TelemetryBatch)]
    assert {b.same["gpu_temp_c"] for b in batches} == {41.0}
    hosts = [r for r in stored if isinstance(r, TelemetryRecord) and "load_1m" in r.values]
    assert hosts and all(r.gpu_reason is None for r in hosts)


VALUES = st.none() | st.floats(-1e9, 1e9).map(lambda value: round(value, 3))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 10**7), st.dictionaries(st.sampled_from("abc"), VALUES)),
        min_size=1,
        max_size=12,
    )
)
def test_a_batch_gives_back_what_was_put_in(
    rows: list[tuple[int, dict[str, float | None]]],
) -> None:
    names = dict.fromkeys(name for _, values in rows for name in values)
    times = list(itertools.accumulate((dt_us * 1_000 for dt_us, _ in rows), initial=5_000))[1:]
    samples = [
        TelemetryRecord(utc=EPOCH.strftime(UTC), t_ns=at, values=names | values)
        for at, (_, values) in zip(times, rows, strict=True)
    ]
    batch = TelemetryBatch.model_validate_json(packed(samples).model_dump_json())
    back = list(unpacked(batch))
    assert [r.t_ns for r in back] == [s.t_ns for s in samples]
    assert [r.values for r in back] == [s.values for s in samples]


def test_times_are_kept_to_the_microsecond_and_the_second_of_day() -> None:
    samples = [
        TelemetryRecord(utc="2026-12-01T05:59:59Z", t_ns=7_000_999, values={"x": 1.23456}),
        TelemetryRecord(utc="2026-12-01T06:00:00Z", t_ns=1_007_001_000, values={"x": 2.0, "y": 1}),
    ]
    batch = packed(samples)
    assert (batch.t_ns, batch.dt_us) == (7_000_000, (1_000_001,))
    assert batch.changes == {"x": (1.235, 0.765)} and batch.values == {"y": (None, 1.0)}
    late = list(unpacked(batch))[1]
    assert (late.utc, late.t_ns) == ("2026-12-01T06:00:00Z", 1_007_001_000)
    assert late.values == {"x": 2.0, "y": 1.0}
    with pytest.raises(ValueError, match="x has 1 values for 2 samples"):
        list(unpacked(batch.model_copy(update={"changes": {"x": (1.0,)}})))


def test_six_minutes_of_a_card_take_a_fifth_of_a_megabyte(tmp_path: Path) -> None:
    """One line a cell, twenty readings a second; power and temperature move, clocks hardly."""
    draw = random.Random(1)
    writer, stored, energy = RunWriter(tmp_path), [], 1e6
    for cell in range(12):
        samples = []
        for i in range(600):
            energy += 25.0 + draw.random()
            values = {
                "gpu_sm_clock_mhz": 1980.0 - 15.0 * (draw.random() < 0.02),
                "gpu_mem_clock_mhz": 3201.0,
                "gpu_power_w": 500.0 + draw.gauss(0, 20),
                "gpu_energy_j": energy,
                "gpu_temp_c": 60.0 + (i // 100) % 3,
                "gpu_mem_bytes": 70.0 * 2**30,
                "gpu_busy_share": round(0.9 + 0.1 * draw.random(), 2),
                "gpu_clock_reasons": 0.0,
                "gpu_processes": 1.0,
            }
            at = (cell * 600 + i) * 50_000_000 + draw.randrange(100_000)
            samples.append(TelemetryRecord(utc="2026-12-01T05:00:00Z", t_ns=at, values=values))
        writer.append_telemetry(packed(samples))
        stored += samples
    writer.write_run(a_run())
    writer.close()
    size = (tmp_path / "telemetry.jsonl").stat().st_size
    assert len(stored) == 7_200
    assert size < 250_000, size  # one line a sample took 1.8 MB
    back = load_run(tmp_path).telemetry
    assert [t.t_ns // 1_000 for t in back] == [t.t_ns // 1_000 for t in stored]
    assert all(
        a.values[n] == pytest.approx(b.values[n], abs=6e-4)
        for a, b in zip(back, stored, strict=True)
        for n in b.values
    )


def test_a_batch_with_a_column_cut_is_a_broken_bundle(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.write_run(a_run())
    samples = [
        TelemetryRecord(utc=EPOCH.strftime(UTC), t_ns=i * 1000, values={"x": i}) for i in (1, 2)
    ]
    writer.append_telemetry(packed(samples).model_copy(update={"changes": {"x": (1.0,)}}))
    writer.close()
    with pytest.raises(BundleBroken, match=r"telemetry.jsonl, line 1: x has 1 values"):
        load_run(tmp_path)


def test_without_a_gpu_the_reason_is_on_record() -> None:
    stored: list[TelemetryRecord | TelemetryBatch] = []
    telemetry = Telemetry(stored.append, {})
    telemetry.watch({"device": "cpu"})
    telemetry.read()
    telemetry.stop()
    (only,) = stored
    assert isinstance(only, TelemetryRecord)
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
