"""Servers in real containers: the real engine, and every way one can end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import pytest
from docker.errors import NotFound
from own_daemon import IMAGE, TOY_VK, Daemon, environment_for, images_file

from finalbench.arms import Settings, serve_command, server_settings
from finalbench.errors import EnvironmentMissing, UsageError
from finalbench.runtime.container import ContainerRuntime
from finalbench.runtime.container_engine import OWNER_LABEL, RUN_LABEL
from finalbench.runtime.process import choose_port
from finalbench.runtime.server import LiveServer, ServerStartFailed, Wanted, start_server
from finalbench.scenario import load_scenario, parse_override

pytestmark = pytest.mark.container


def settings(arm: str = "vk", **changes: str | int | None) -> Settings:
    scenario = load_scenario("vk-tiny", [parse_override("serving.threads=1")])
    return server_settings(arm, scenario) | changes


def wanted(folder: Path, arm: str = "vk", timeout_s: float = 60) -> Wanted:
    return Wanted(arm, "test-run", folder / f"{arm}.log", timeout_s)


def toy_runtime(
    engine: Daemon, folder: Path, behaviour: str = "fast", model: str = "vk-tiny", **fields: object
) -> ContainerRuntime:
    inside = {"PATH": "/usr/bin:/bin", "TOY": behaviour, "TOY_MODEL": model}
    images = images_file(folder, entry=TOY_VK, environment=inside, **fields)
    return ContainerRuntime.open(environment_for(engine.url, images))


def inspected(engine: Daemon) -> Mapping[str, object]:
    [name] = engine.containers()
    return engine.client.api.inspect_container(name)


def test_the_real_engine_serves_from_a_container(
    engine: Daemon, environment: dict[str, str], tmp_path: Path
) -> None:
    runtime = ContainerRuntime.open(environment)
    server = runtime.start(settings(), wanted(tmp_path, timeout_s=120))
    try:
        assert server.runtime == "container"
        assert server.settings["profile"] == "vkae"
        assert server.settings["threads"] == 1
        assert server.image_digest == engine.client.images.get(IMAGE).id
        assert server.pid and Path(f"/proc/{server.pid}").exists()
        assert complete(server)["usage"]["completion_tokens"] == 4
    finally:
        code = server.stop()
    assert code in (0, 143)
    assert "serving vk-tiny" in (tmp_path / "vk.log").read_text()


def test_a_container_may_do_little(engine: Daemon, tmp_path: Path) -> None:
    server = toy_runtime(engine, tmp_path).start(settings(), wanted(tmp_path))
    try:
        facts = inspected(engine)
        host, config = facts["HostConfig"], facts["Config"]
        assert host["CapDrop"] == ["ALL"]
        assert host["SecurityOpt"] == ["no-new-privileges"]
        assert host["ReadonlyRootfs"] is True
        assert host["PidsLimit"] == 4096
        assert host["Init"] is True
        assert not host["Privileged"]
        assert all(mount["ReadOnly"] for mount in host["Mounts"])
        assert config["User"] not in ("", "0", "0:0", "root")
        assert config["Labels"][RUN_LABEL] == "test-run"
        assert config["Labels"][OWNER_LABEL].startswith(f"{os.getpid()}@")
        assert "HF_HUB_OFFLINE=1" in config["Env"]
        # Nothing of the harness's own environment goes in.
        assert not any(line.startswith(("DOCKER_HOST=", "HF_TOKEN=")) for line in config["Env"])
        code, _ = engine.client.containers.get(facts["Id"]).exec_run(
            [sys.executable, "-c", "open('/etc/x', 'w')"]
        )
        assert code != 0
    finally:
        server.stop()


def test_a_killed_container_is_told_in_words(engine: Daemon, tmp_path: Path) -> None:
    server = toy_runtime(engine, tmp_path).start(settings(), wanted(tmp_path))
    assert server.died() is None
    engine.client.api.kill(engine.containers()[0])
    assert "killed by SIGKILL" in died(server)
    assert server.stop() == 137
    assert server.stop() == 137  # again does no harm


def test_a_container_somebody_removed(engine: Daemon, tmp_path: Path) -> None:
    server = toy_runtime(engine, tmp_path).start(settings(), wanted(tmp_path))
    engine.client.api.remove_container(engine.containers()[0], force=True)
    assert "somebody removed it" in died(server)
    assert server.stop() is None


def test_out_of_memory_names_the_limit(engine: Daemon, tmp_path: Path) -> None:
    greedy = (sys.executable, "-c", "x = b'.' * (1 << 30)")
    images = images_file(tmp_path, entry=greedy, memory="64m")
    runtime = ContainerRuntime.open(environment_for(engine.url, images))
    with pytest.raises(ServerStartFailed, match=r"out of memory \(limit 64m\)"):
        runtime.start(settings(), wanted(tmp_path))


def test_a_server_that_ends_at_once_shows_its_last_line(engine: Daemon, tmp_path: Path) -> None:
    code = "import sys; print('error: the weights are torn'); sys.exit(3)"
    images = images_file(tmp_path, entry=(sys.executable, "-c", code))
    runtime = ContainerRuntime.open(environment_for(engine.url, images))
    with pytest.raises(ServerStartFailed, match=r"exit code 3.*weights are torn") as caught:
        runtime.start(settings(), wanted(tmp_path))
    assert caught.value.exit_code_of_server == 3
    assert caught.value.runtime == "container"
    assert caught.value.last_line == "the weights are torn"


def test_a_command_that_is_not_there(engine: Daemon, tmp_path: Path) -> None:
    images = images_file(tmp_path, entry=("/no/such/vk",))
    runtime = ContainerRuntime.open(environment_for(engine.url, images))
    with pytest.raises(ServerStartFailed, match=r"its command is not in the image.*/no/such/vk"):
        runtime.start(settings(), wanted(tmp_path))


def test_a_server_that_never_gets_healthy_times_out(engine: Daemon, tmp_path: Path) -> None:
    runtime = toy_runtime(engine, tmp_path, "ok,start_ms=60000")
    with pytest.raises(ServerStartFailed, match="not ready after 2 s"):
        runtime.start(settings(), wanted(tmp_path, timeout_s=2))


def test_a_taken_port_is_tried_again_with_another(
    engine: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        from finalbench.runtime.process import choose_port

        ports = iter([taken.getsockname()[1], choose_port()])
        monkeypatch.setattr("finalbench.runtime.container.choose_port", lambda host: next(ports))
        server = toy_runtime(engine, tmp_path).start(settings(), wanted(tmp_path, timeout_s=30))
    assert server.stop() is not None
    assert (tmp_path / "vk.port0.log").exists()


def test_the_wrong_model_on_the_port_is_refused(engine: Daemon, tmp_path: Path) -> None:
    runtime = toy_runtime(engine, tmp_path, model="another-model")
    with pytest.raises(ServerStartFailed, match="serves 'another-model', asked for 'vk-tiny'"):
        runtime.start(settings(), wanted(tmp_path))


def test_another_server_on_the_port_is_refused(engine: Daemon, tmp_path: Path) -> None:
    runtime = toy_runtime(engine, tmp_path, "wrong_nonce")
    with pytest.raises(ServerStartFailed, match="its nonce is not ours"):
        runtime.start(settings(), wanted(tmp_path))


def test_a_gpu_the_engine_cannot_give(
    engine: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finalbench.runtime.container_gpu.host_uuids", lambda env: ["GPU-0a"])
    with pytest.raises(EnvironmentMissing, match="no access to GPUs"):
        toy_runtime(engine, tmp_path).start(settings(device="cuda"), wanted(tmp_path))


def test_a_gpu_that_is_not_inside_ends_before_any_traffic(
    engine: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Podman's API, which drops the device request without a word."""
    monkeypatch.setattr("finalbench.runtime.container_gpu.host_uuids", lambda env: ["GPU-0a"])
    monkeypatch.setattr("finalbench.runtime.container_launch.device_requests", lambda uuids: [])
    monkeypatch.setattr("finalbench.runtime.container.wait_ready", lambda *a, **k: pytest.fail())
    with pytest.raises(EnvironmentMissing, match="sees no GPU, although 1 were asked for"):
        toy_runtime(engine, tmp_path).start(settings(device="cuda"), wanted(tmp_path))


def test_more_gpus_than_there_are(engine: Daemon, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="1 GPU asked for, none here"):
        runtime = toy_runtime(engine, tmp_path)
        object.__setattr__(runtime, "environment", {"CUDA_VISIBLE_DEVICES": ""})
        runtime.start(settings(device="cuda"), wanted(tmp_path))


def test_an_image_that_cannot_be_pulled(engine: Daemon, tmp_path: Path) -> None:
    runtime = toy_runtime(engine, tmp_path, image="127.0.0.1:1/finalbench/none:1")
    assert runtime.missing(["vk"]) == ["127.0.0.1:1/finalbench/none:1"]
    with pytest.raises(EnvironmentMissing, match=r"cannot be pulled.*refused"):
        runtime.prepare(["vk"], lambda line: None)


def test_pinned_refuses_an_image_without_a_digest(engine: Daemon, tmp_path: Path) -> None:
    environment = environment_for(engine.url, images_file(tmp_path))
    runtime = ContainerRuntime.open(environment, pinned=True)
    with pytest.raises(UsageError, match="has no digest"):
        runtime.prepare(["vk"], lambda line: None)


def test_the_sweep_takes_only_what_is_left_behind(engine: Daemon, tmp_path: Path) -> None:
    from finalbench.runtime.container_engine import owner_labels

    def made(name: str, **labels: str) -> None:
        engine.client.containers.create(
            IMAGE, ["x"], name=name, network_mode="none", labels=owner_labels("r") | labels
        )

    made("mine")
    made("dead", **{OWNER_LABEL: "999999@1.00"})
    made("elsewhere", **{OWNER_LABEL: "999999@1.00", "io.finalbench.host": "another"})
    engine.client.containers.create(IMAGE, ["x"], name="strange", network_mode="none")
    assert toy_runtime(engine, tmp_path).sweep() == ["dead"]
    assert sorted(engine.containers()) == ["elsewhere", "mine", "strange"]
    toy_runtime(engine, tmp_path).close("r")
    assert sorted(engine.containers()) == ["elsewhere", "strange"]
    for name in engine.containers():
        engine.client.containers.get(name).remove(force=True)
    with pytest.raises(NotFound):
        engine.client.containers.get("mine")


def test_starting_in_a_container_costs_little(engine: Daemon, tmp_path: Path) -> None:
    runtime = toy_runtime(engine, tmp_path)
    runtime.prepare(["vk"], lambda line: None)
    server = runtime.start(settings(), wanted(tmp_path))
    begun = time.monotonic()
    server.stop()
    assert time.monotonic() - begun < 5  # a SIGTERM that reaches the server, not the grace


def test_the_runtime_adds_less_than_a_second_to_a_start(engine: Daemon, tmp_path: Path) -> None:
    """Against the bare command, polled just as often: process and container, medians of three."""
    runtime = toy_runtime(engine, tmp_path)
    runtime.prepare(["vk"], lambda line: None)
    environment = os.environ | {"FINALBENCH_VK": " ".join(TOY_VK), "TOY": "fast"}
    seconds: dict[str, list[float]] = {"bare": [], "process": [], "container": []}
    for index in range(3):
        seconds["bare"].append(bare_start(environment))
        log = tmp_path / f"{index}.log"
        ours = start_server(settings(), log=log, timeout_s=60, environment=environment)
        ours.stop()
        seconds["process"].append(ours.start_seconds or 0.0)
        server = runtime.start(settings(), wanted(tmp_path, timeout_s=60))
        server.stop()
        seconds["container"].append(server.start_seconds or 0.0)
    middle = {name: median(values) for name, values in seconds.items()}
    shown = ", ".join(f"{name} {value:.2f} s" for name, value in middle.items())
    print(shown)  # noqa: T201
    assert middle["bare"] > 0, shown
    assert middle["process"] - middle["bare"] < 1.0, shown
    assert middle["container"] - middle["bare"] < 1.0, shown


def bare_start(environment: Mapping[str, str]) -> float:
    """Seconds from a plain child process to its first good answer."""
    port = choose_port()
    command = serve_command(TOY_VK, settings(), host="127.0.0.1", port=port)
    begun = time.monotonic()
    with subprocess.Popen(command, env=dict(environment), stdout=subprocess.DEVNULL) as process:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.05)
        taken = time.monotonic() - begun
        process.terminate()
    return taken


def complete(server: LiveServer) -> Mapping[str, Mapping[str, int]]:
    body = {"model": server.model_id, "prompt": "a b c", "max_tokens": 4, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def died(server: LiveServer) -> str:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if (reason := server.died()) is not None:
            return reason
        time.sleep(0.05)
    return "still runs"
