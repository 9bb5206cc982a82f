"""Whole runs in containers through the command line: measured, cut, killed, refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from own_daemon import TOY_VK, Daemon, environment_for, images_file, running_daemon

from finalbench.record import load_run

pytestmark = pytest.mark.container

SMALL = {
    "measure.blocks": "1",
    "workload.requests": "2",
    "axes.seq_len": "[32]",
    "axes.output_len": "[8]",
    "axes.sampling": "[greedy]",
    "axes.draft": "[mtp3]",
    "base": "{seq_len: 32, output_len: 8, sampling: greedy, draft: mtp3}",
    "serving.threads": "1",
    "measure.bare_loop": "false",
    "measure.client_ceiling": "false",
}


def command(results: Path, runtime: str = "container", **sets: str) -> list[str]:
    words = [sys.executable, "-m", "finalbench", "run", "vk-tiny", "--runtime", runtime]
    words += ["--results-dir", str(results), "--no-progress"]
    for key, value in (SMALL | {k.replace("__", "."): v for k, v in sets.items()}).items():
        words += ["--set", f"{key}={value}"]
    return words


def call(
    words: list[str], environment: dict[str, str], timeout_s: float = 200
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def toy_environment(engine: Daemon, folder: Path, behaviour: str = "fast") -> dict[str, str]:
    inside = {"PATH": "/usr/bin:/bin", "TOY": behaviour}
    return environment_for(engine.url, images_file(folder, entry=TOY_VK, environment=inside))


def only_run(results: Path) -> Path:
    [path] = results.glob("*/run.json")
    return path.parent


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_container(
    engine: Daemon, tmp_path: Path, number: signal.Signals
) -> None:
    results = tmp_path / "results"
    environment = toy_environment(engine, tmp_path, "ok,step_ms=200")
    process = started(command(results), environment, engine)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert engine.containers() == []
    assert load_run(only_run(results)).run.status == "cancelled"


def test_a_killed_harness_is_cleaned_up_after_by_the_next(engine: Daemon, tmp_path: Path) -> None:
    slow = toy_environment(engine, tmp_path, "ok,step_ms=200")
    process = started(command(tmp_path / "results"), slow, engine)
    process.kill()
    process.communicate(timeout=60)
    [orphan] = engine.containers()
    planned = call([sys.executable, "-m", "finalbench", "clean", "--dry-run", "--json"], slow)
    assert json.loads(planned.stdout)["containers"] == [orphan]
    assert engine.containers() == [orphan]
    fast = toy_environment(engine, tmp_path)
    ended = call([*command(tmp_path / "results"), "--fresh"], fast)
    assert f"removed {orphan}" in ended.stderr
    assert engine.containers() == []


def test_clean_removes_what_a_killed_harness_left(engine: Daemon, tmp_path: Path) -> None:
    environment = toy_environment(engine, tmp_path, "ok,step_ms=200")
    process = started(command(tmp_path / "results"), environment, engine)
    process.kill()
    process.communicate(timeout=60)
    clean = [sys.executable, "-m", "finalbench", "clean", "--results-dir", str(tmp_path)]
    ended = call(clean, environment)
    assert ended.returncode == 0, ended.stderr
    assert engine.containers() == []


def test_a_container_killed_in_a_measurement_fails_its_cell(engine: Daemon, tmp_path: Path) -> None:
    results = tmp_path / "results"
    environment = toy_environment(engine, tmp_path, "ok,step_ms=300")
    process = started(
        [*command(results, workload__requests="4"), "--arms", "vk"], environment, engine
    )
    engine.client.api.kill(engine.containers()[0])
    _, err = process.communicate(timeout=120)
    assert process.returncode == 4, err
    run = load_run(only_run(results)).run
    assert run.status == "partial"
    assert "killed by SIGKILL" in run.failures[0].reason
    assert engine.containers() == []


def test_memory_that_runs_out_in_a_measurement_fails_its_cell(
    engine: Daemon, tmp_path: Path
) -> None:
    results, trigger = tmp_path / "results", tmp_path / "shown" / "now"
    trigger.parent.mkdir()
    inside = {"PATH": "/usr/bin:/bin", "TOY": "ok,step_ms=300", "TOY_HOG_WHEN": str(trigger)}
    path = images_file(tmp_path, entry=TOY_VK, environment=inside, memory="256m")
    document = yaml.safe_load(path.read_text())
    document["servers"]["any"]["mounts"].append(str(trigger.parent))
    path.write_text(yaml.safe_dump(document))
    words = [*command(results, workload__requests="4"), "--arms", "vk"]
    process = started(words, environment_for(engine.url, path), engine)
    trigger.touch()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 4, err
    run = load_run(only_run(results)).run
    assert run.status == "partial"
    assert "out of memory (limit 256m)" in run.failures[0].reason
    assert engine.containers() == []


def test_no_daemon_is_one_message_with_two_hints(tmp_path: Path) -> None:
    environment = environment_for(f"unix://{tmp_path}/none.sock", images_file(tmp_path))
    ended = call(command(tmp_path / "results"), environment)
    assert ended.returncode == 3
    assert "no container engine answers" in ended.stderr
    assert "no such file or directory" in ended.stderr
    assert "start Docker" in ended.stderr
    assert "--runtime process" in ended.stderr
    assert not (tmp_path / "results").exists()


def test_a_daemon_that_dies_in_the_middle_ends_the_run(tmp_path: Path, daemon: Daemon) -> None:
    """On a daemon of its own; `daemon` only makes sure that one can be started."""
    with running_daemon() as mortal:
        environment = toy_environment(mortal, tmp_path, "ok,step_ms=200")
        process = started(command(tmp_path / "results"), environment, mortal)
        container = mortal.client.containers.list()[0]
        pid = container.attrs["State"]["Pid"]
        mortal.process.kill()
        mortal.process.wait(20)
        os.kill(pid, signal.SIGKILL)  # nobody is left to end it
        _, err = process.communicate(timeout=120)
        assert process.returncode in (3, 4), err
        assert "engine no longer answers" in err or "cannot be started" in err


def test_auto_says_what_it_chose_and_why(engine: Daemon, tmp_path: Path) -> None:
    environment = toy_environment(engine, tmp_path)
    ended = call(command(tmp_path / "results", "auto"), environment)
    assert "runtime: container: Docker" in ended.stderr
    assert "every image is here" in ended.stderr
    records = load_run(only_run(tmp_path / "results"))
    assert {server.runtime for server in records.servers} == {"container"}
    missing = environment_for(engine.url, images_file(tmp_path, image="not/there:1"))
    words = command(tmp_path / "other", "auto", serving__threads="nonsense")
    assert "runtime:" not in call(words, missing).stderr  # a usage error comes first


def started(words: list[str], environment: dict[str, str], engine: Daemon) -> subprocess.Popen[str]:
    """A harness in the middle of its measurement: the first request is on disk."""
    results = Path(words[words.index("--results-dir") + 1])
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        journals = list(results.glob("*/requests.jsonl.zst"))
        if engine.containers() and journals and journals[0].stat().st_size:
            return process
        time.sleep(0.1)
    process.kill()
    raise AssertionError(process.communicate()[1])
