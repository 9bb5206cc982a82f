"""Our Dockerfiles built over a local base, and what comes out of them served and measured."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from docker.types import Mount
from own_base import SITE, build_bases
from own_daemon import ROOT, Daemon, environment_for

from finalbench.record import load_run
from finalbench.runtime.container_images import load_catalogue
from finalbench.runtime.process import choose_port

pytestmark = pytest.mark.container

SHIPPED = load_catalogue(ROOT / "containers" / "images.yaml")
VK, STOCK = SHIPPED.servers["vk"].image, SHIPPED.servers["stock"].image
MODEL = "vk-vk-tiny:latest"
SMALL = {
    "measure.blocks": "1",
    "workload.requests": "2",
    "workload.warmup_rounds": "3",
    "axes.seq_len": "[32]",
    "axes.output_len": "[8]",
    "axes.sampling": "[greedy]",
    "axes.draft": "[mtp3]",
    "base": "{seq_len: 32, output_len: 8, sampling: greedy, draft: mtp3}",
    "serving.threads": "1",
    "measure.client_ceiling": "false",
}


@pytest.fixture(scope="module")
def images(daemon: Daemon) -> Iterator[None]:
    build_bases(daemon.url, daemon.client)
    yield
    for name in (MODEL, STOCK, VK):
        daemon.client.images.remove(name, force=True)


def inside(**more: object) -> dict[str, object]:
    """How `docker run` would be typed, and the packages that the base does not hold."""
    return {
        "mounts": [Mount(target=SITE, source=SITE, type="bind", read_only=True)],
        "network_mode": "host",
        "read_only": True,
        "tmpfs": {"/tmp": "exec,mode=1777"},
        "detach": True,
        **more,
    }


def test_the_bases_hold_the_engine_and_say_what_they_are(engine: Daemon, images: None) -> None:
    config = engine.client.images.get(VK).attrs["Config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["vk"]
    assert list(config["ExposedPorts"]) == ["8000/tcp"]
    assert config["Healthcheck"]["Test"] == ["CMD", "vk-model", "--health"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.version"] == "0.1.0"
    commit = labels["org.opencontainers.image.revision"].removesuffix("-dirty")
    assert len(commit) == 40 and int(commit, 16)
    assert labels["org.opencontainers.image.source"] == "test"
    assert "VK_PROFILE=stock" in engine.client.images.get(STOCK).attrs["Config"]["Env"]
    # The engine alone: nothing of the harness is copied in.
    script = "import importlib.util as u; print(u.find_spec('vkengine').origin)"
    script += "; print(u.find_spec('finalbench'))"
    told = engine.client.containers.run(
        VK, ["-c", script], entrypoint=["python3"], network_mode="none", remove=True
    )
    assert told.decode().split() == ["/opt/engine/vkengine/__init__.py", "None"]


def test_a_model_image_needs_no_argument(engine: Daemon, images: None) -> None:
    port = choose_port()
    container = engine.client.containers.run(
        MODEL, environment={"VK_PORT": str(port), "HF_HUB_OFFLINE": "1"}, **inside()
    )
    try:
        url = f"http://127.0.0.1:{port}"
        answered(url + "/health", container)
        with urllib.request.urlopen(url + "/v1/models", timeout=10) as response:
            assert [m["id"] for m in json.load(response)["data"]] == ["vk-tiny"]
        body = {"model": "vk-tiny", "prompt": "a b c", "max_tokens": 4, "ignore_eos": True}
        request = urllib.request.Request(
            url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 4
        assert container.exec_run(["vk-model", "--health"]).exit_code == 0
        container.stop(timeout=10)
        assert container.wait()["StatusCode"] in (0, 143)  # ended by SIGTERM, not by the grace
    finally:
        container.remove(force=True, v=True)


def test_a_missing_checkpoint_is_one_line_and_exit_3(engine: Daemon, images: None) -> None:
    lost = {"VK_MODEL": "qwen35-35b-a3b", "VK_SOURCE": "Qwen/Qwen3.5-35B-A3B"}
    container = engine.client.containers.run(
        MODEL, environment=lost | {"HF_HUB_OFFLINE": "1"}, **inside()
    )
    try:
        assert container.wait(timeout=60)["StatusCode"] == 3
        [line] = container.logs().decode().strip().splitlines()
        assert line.startswith("error: ") and "qwen35-35b-a3b" in line
    finally:
        container.remove(force=True, v=True)


def test_engine_and_stock_are_measured_in_their_images(
    engine: Daemon, images: None, tmp_path: Path
) -> None:
    document = yaml.safe_load((ROOT / "containers" / "images.yaml").read_text())
    for server in document["servers"].values():
        server["mounts"] = [SITE]
    path = tmp_path / "images.yaml"
    path.write_text(yaml.safe_dump(document))
    words = [sys.executable, "-m", "finalbench", "run", "vk-tiny", "--runtime", "container"]
    words += ["--results-dir", str(tmp_path / "results"), "--no-progress", "--json"]
    words += [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    ended = subprocess.run(
        words,
        env=environment_for(engine.url, path),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    # 6 is an interval too wide to tell, as one block of two requests may be.
    assert ended.returncode in (0, 6), ended.stderr
    assert {cell["runtime"] for cell in json.loads(ended.stdout)["cells"]} == {"container"}
    [found] = (tmp_path / "results").glob("*/run.json")
    records = load_run(found.parent)
    assert records.run.status == "complete"
    built = {arm: engine.client.images.get(name).id for arm, name in (("vk", VK), ("stock", STOCK))}
    assert {(s.arm, s.image_digest) for s in records.servers} == set(built.items())
    assert {s.runtime for s in records.servers} == {"container"}
    assert all(server.exit_code in (0, 143) for server in records.servers)
    assert records.run.provenance.environment["FINALBENCH_RUNTIME"] == "container"
    assert records.run.bare_loop is not None
    assert records.run.bare_loop.decode_tok_s is not None, records.run.bare_loop.reason
    logs = [found.parent / str(server.log) for server in records.servers]
    assert all("serving vk-tiny" in log.read_text() for log in logs)
    assert engine.containers() == []


def answered(url: str, container: object, timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(container.logs().decode())  # ty: ignore[unresolved-attribute]
