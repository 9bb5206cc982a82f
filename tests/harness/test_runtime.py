"""Servers: started, proven to be ours, watched, and ended for certain."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finalbench.arms import Settings, serve_command, server_settings
from finalbench.errors import EnvironmentMissing
from finalbench.runtime import server as server_module
from finalbench.runtime.preflight import check_environment, checkpoint_folder
from finalbench.runtime.process import ServerProcess, describe_exit, last_lines, wait_gone
from finalbench.runtime.ready import ServerFailed, check_settings
from finalbench.runtime.server import (
    LiveServer,
    ServerStartFailed,
    attach_endpoint,
    start_server,
    vk_executable,
)
from finalbench.scenario import load_scenario, parse_override

FAKE_VK = f"{sys.executable} {Path(__file__).parent / 'fake_vk.py'}"


def settings_of(arm: str = "vk") -> Settings:
    scenario = load_scenario("vk-tiny", [parse_override("serving.threads=1")])
    return server_settings(arm, scenario)


def start(tmp_path: Path, behaviour: str = "fast", *, timeout_s: float = 20) -> LiveServer:
    environment = os.environ | {"FINALBENCH_VK": FAKE_VK, "VK_FAKE": f"vk:{behaviour}"}
    return start_server(
        settings_of(), log=tmp_path / "server.log", timeout_s=timeout_s, environment=environment
    )


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    server = start(tmp_path)
    yield server
    server.stop()


def test_a_started_server_is_ours_and_ends(tmp_path: Path) -> None:
    server = start(tmp_path)
    assert server.settings["nonce"] == server.nonce != ""
    assert server.model_id == "vk-tiny"
    assert server.start_seconds is not None and server.start_seconds > 0
    assert server.died() is None
    pid = server.pid
    assert pid is not None
    assert server.stop() in (0, -signal.SIGTERM)
    assert wait_gone(pid, 2)
    assert server.stop() is not None  # again does no harm


def test_a_nonce_that_is_not_ours_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ServerStartFailed, match="its nonce is not ours") as caught:
        start(tmp_path, "wrong_nonce")
    port = caught.value.command[caught.value.command.index("--port") + 1]
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", int(port)))


@pytest.mark.slow
def test_a_server_that_never_gets_ready_times_out(tmp_path: Path) -> None:
    with pytest.raises(ServerStartFailed, match=r"not ready after 2 s \(/health answers 503\)"):
        start(tmp_path, "ok,start_ms=60000", timeout_s=2)


@pytest.mark.slow
def test_a_taken_port_is_tried_again_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        ports = iter([taken])
        real = server_module.choose_port
        monkeypatch.setattr(server_module, "choose_port", lambda host: next(ports, 0) or real(host))
        server = start(tmp_path)
    try:
        assert not server.base_url.endswith(f":{taken}")
        assert (tmp_path / "server.port0.log").exists()
    finally:
        server.stop()


@pytest.mark.slow
def test_a_port_that_stays_taken_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        monkeypatch.setattr(server_module, "choose_port", lambda host: taken)
        with pytest.raises(ServerStartFailed, match="in use"):
            start(tmp_path)


def test_death_is_told_in_words(tmp_path: Path) -> None:
    server = start(tmp_path)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while server.died() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert re.search(r"killed by SIGKILL.*last lines", str(server.died()))
    server.stop()


def script(tmp_path: Path, body: str) -> ServerProcess:
    path = tmp_path / "child.py"
    path.write_text(textwrap.dedent(body), encoding="utf-8")
    return ServerProcess.start([sys.executable, str(path)], tmp_path / "child.log", os.environ)


def wait_for_line(log: Path, text: str) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if log.exists() and text in log.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"{text!r} never appeared")


def test_a_server_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    process = script(
        tmp_path,
        """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.fork()
        print("up", flush=True)
        time.sleep(600)
        """,
    )
    wait_for_line(tmp_path / "child.log", "up\nup")
    began = time.monotonic()
    assert process.stop(grace_s=0.3) == -signal.SIGKILL
    assert time.monotonic() - began < 5
    assert wait_gone(process.pid, 2)


@pytest.mark.slow
def test_children_of_a_server_that_ended_by_itself_are_killed(tmp_path: Path) -> None:
    process = script(
        tmp_path,
        """
        import os, time
        if os.fork() == 0:
            print("child", flush=True)
            time.sleep(600)
        time.sleep(0.2)
        """,
    )
    wait_for_line(tmp_path / "child.log", "child")
    assert process.wait(5) == 0
    process.stop()
    assert wait_gone(process.pid, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_killed_harness_takes_its_server_along(tmp_path: Path) -> None:
    code = f"""
import os, sys, time
from pathlib import Path
from typing import Any
from finalbench.runtime.process import ServerProcess
p = ServerProcess.start([sys.executable, "-c", "import time; time.sleep(600)"],
                        Path({str(tmp_path)!r}) / "s.log", os.environ)
print(p.pid, flush=True)
time.sleep(600)
"""
    harness = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert harness.stdout is not None
    pid = int(harness.stdout.readline())
    harness.kill()
    harness.wait()
    harness.stdout.close()
    assert wait_gone(pid, 5)


def test_a_command_that_does_not_exist_is_an_environment_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="cannot start '/no/such/vk'"):
        ServerProcess.start(["/no/such/vk"], tmp_path / "x.log", {})


def test_vk_is_found_or_missed_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vk_executable({"FINALBENCH_VK": "a 'b c'"}) == ["a", "b c"]
    monkeypatch.setattr(server_module.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(EnvironmentMissing, match="`vk` is not installed"):
        vk_executable({"PATH": str(tmp_path)})


def test_last_lines_and_exit_words(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert last_lines(log) == []
    log.write_bytes(b"\n".join(b"line %d" % i for i in range(5000)) + b"\n\n\xff")
    assert last_lines(log, 2) == ["line 4999", "\ufffd"]
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "killed by SIGKILL"


@pytest.mark.parametrize(
    ("key", "served", "message"),
    [
        ("profile", "vkue", "runs with profile 'vkue', asked for 'vkae'"),
        ("dtype", "bfloat16", "runs with dtype 'bfloat16', asked for 'float32'"),
        ("threads", 2, "runs 2 threads, asked for 1"),
        ("nonce", "other", "nonce is not ours"),
    ],
)
def test_settings_that_differ_are_refused(key: str, served: object, message: str) -> None:
    good = {
        "profile": "vkae",
        "dtype": "torch.float32",
        "weights": "real",
        "device": "cpu",
        "threads": 1,
        "nonce": "n",
    }
    check_settings(good, settings_of(), nonce="n")
    with pytest.raises(ServerFailed, match=message):
        check_settings(good | {key: served}, settings_of(), nonce="n")
    with pytest.raises(EnvironmentMissing, match="runs on 'cpu', asked for 'cuda'"):
        check_settings(good, settings_of() | {"device": "cuda"}, nonce="n")


def test_random_weights_must_be_served_as_asked() -> None:
    asked = settings_of() | {"weights": "random:1"}
    check_settings({"weights": "random:1"}, asked, nonce=None)
    with pytest.raises(ServerFailed, match="weights 'random:1', asked for 'real'"):
        check_settings({"weights": "random:1"}, settings_of(), nonce=None)
    for served in ("real", "random:2"):
        with pytest.raises(ServerFailed, match="weights"):
            check_settings({"weights": served}, asked, nonce=None)


def test_an_endpoint_is_used_and_never_stopped(live: LiveServer) -> None:
    attached = attach_endpoint(live.base_url, settings_of(), timeout_s=2)
    assert attached.runtime == "endpoint"
    assert attached.stop() is None
    assert live.died() is None


def test_an_endpoint_that_does_not_answer_is_an_environment_error() -> None:
    with socket.socket() as holder:  # bound, not listening: nobody else can take the port
        holder.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(EnvironmentMissing, match="not ready after"):
            attach_endpoint(url, settings_of(), timeout_s=0.2)


def test_command_line_of_a_server() -> None:
    command = serve_command(["vk"], settings_of("stock"), host="127.0.0.1", port=9)
    assert command[:3] == ["vk", "serve", "vk-tiny"]
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert options["--profile"] == "stock"
    assert options["--threads"] == "1"
    assert options["--port"] == "9"
    assert options["--max-model-len"] == str(2048 + 64 + 16)


def test_preflight_says_all_that_is_missing_and_what_to_run_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finalbench.runtime.preflight.list_gpus", list)
    environment = {"FINALBENCH_VK": "vk", "HF_HOME": str(tmp_path)}
    with pytest.raises(EnvironmentMissing) as caught:
        check_environment(load_scenario("qwen35-35b-a3b"), environment)
    message = str(caught.value)
    for part in ("1 CUDA GPU", "80 GB of memory", "the weights of Qwen/Qwen3.5-35B-A3B (72 GB)"):
        assert part in message
    assert "here: no GPU, no checkpoint" in message
    assert "finalbench run --model vk-tiny" in str(caught.value.hint)
    check_environment(load_scenario("vk-tiny"), environment)


def test_a_checkpoint_is_found_in_the_cache(tmp_path: Path) -> None:
    scenario = load_scenario("qwen35-35b-a3b")
    environment = {"HF_HOME": str(tmp_path)}
    assert checkpoint_folder(scenario, environment) is None
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3.5-35B-A3B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert checkpoint_folder(scenario, environment) == snapshot


def test_a_signal_while_a_child_is_made_leaves_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held back until the child is there, and then there must be nobody left who knows it."""
    made: list[subprocess.Popen[bytes]] = []
    original = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        made.append(original(*arguments, **options))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)  # whichever thread takes it has taken it
        return made[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    # A second thread: a signal that this one has blocked would be delivered there.
    other, end = threading.Thread(target=lambda: end.wait(60)), threading.Event()
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            ServerProcess.start(
                [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", os.environ
            )
    finally:
        end.set()
        other.join()
    assert made[0].poll() is not None
