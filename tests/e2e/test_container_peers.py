"""A server of another project in a container: read back, proven ours, and a GPU it must have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from own_daemon import ROOT, Daemon, environment_for, images_file

from finalbench.arms import server_settings
from finalbench.runtime.container import ContainerRuntime
from finalbench.runtime.server import ServerStartFailed, Wanted
from finalbench.scenario import DraftSetting, load_scenario, parse_override

pytestmark = pytest.mark.container

FAKE = (sys.executable, str(ROOT / "tests" / "harness" / "fake_vllm.py"))
TEXTS = ("serving.weights=random:1", "serving.device=cpu", "model.dtype=float32")


def runtime(engine: Daemon, folder: Path, fake: str) -> ContainerRuntime:
    inside = {"PATH": "/usr/bin:/bin", "FAKE_VLLM": fake, "PYTHONPATH": str(ROOT)}
    path = images_file(folder, entry=FAKE, environment=inside, arms=["vllm"])
    document = yaml.safe_load(path.read_text())
    document["servers"]["any"]["mounts"].append(str(ROOT / "tests" / "harness"))
    path.write_text(yaml.safe_dump(document))
    return ContainerRuntime.open(environment_for(engine.url, path))


def test_a_peer_is_measured_in_its_container(engine: Daemon, tmp_path: Path) -> None:
    found = load_scenario("qwen35-35b-a3b", [parse_override(text) for text in TEXTS])
    settings = server_settings("vllm", found, DraftSetting(method="mtp", k=2, acceptance=0.5))
    wanted = Wanted("vllm", "test-run", tmp_path / "vllm.log", 60)
    server = runtime(engine, tmp_path, "step_ms=1").start(settings, wanted)
    try:
        assert server.runtime == "container" and server.settings["nonce"] == server.nonce
        assert server.settings["draft_default"]["k"] == 2
        assert server.settings["weights"] == "random"
        folder = str(ROOT / "scenarios" / "shapes" / "qwen35-35b-a3b")
        assert server.command[len(FAKE) + 1] == folder
        [name] = engine.containers()
        mounts = engine.client.api.inspect_container(name)["Mounts"]
        assert {m["Source"]: m["RW"] for m in mounts}[folder] is False
    finally:
        server.stop()


def test_a_peer_of_another_type_is_refused(engine: Daemon, tmp_path: Path) -> None:
    found = load_scenario("qwen35-35b-a3b", [parse_override(text) for text in TEXTS])
    wanted = Wanted("vllm", "test-run", tmp_path / "vllm.log", 60)
    with pytest.raises(ServerStartFailed, match="dtype 'bfloat16', asked for 'float32'"):
        runtime(engine, tmp_path, "dtype=bfloat16").start(server_settings("vllm", found), wanted)
