"""The list of images, what is built from it, and what a container's end is called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from docker.errors import DockerException
from own_daemon import IMAGE, ROOT, Daemon

from finalbench.arms import ARMS
from finalbench.errors import EnvironmentMissing, UsageError
from finalbench.runtime import container_launch
from finalbench.runtime.container_exit import describe_container_exit
from finalbench.runtime.container_gpu import choose, host_uuids
from finalbench.runtime.container_images import (
    Catalogue,
    ImageRef,
    catalogue_file,
    load_catalogue,
    pull_progress,
)

sys.path.insert(0, str(ROOT / "containers"))
import build as builder

SHIPPED = load_catalogue(ROOT / "containers" / "images.yaml")
DIGEST = "sha256:" + "a" * 64


def test_every_arm_has_an_image_and_every_image_its_dockerfile() -> None:
    for arm in ARMS.values():
        if arm.engine != "endpoint":
            assert SHIPPED.server(arm.name).image
    for what in builder.builds(SHIPPED, base=None, pinned=False):
        assert (ROOT / "containers" / what.dockerfile).is_file()


def test_models_are_scenarios() -> None:
    assert {f"{name}.yaml" for name in SHIPPED.models} <= {
        path.name for path in (ROOT / "scenarios").glob("*.yaml")
    }


@pytest.mark.parametrize(
    ("image", "pinned"),
    [
        ("vllm/vllm-openai:v1", f"vllm/vllm-openai@{DIGEST}"),
        ("localhost:5000/vk", f"localhost:5000/vk@{DIGEST}"),
        ("localhost:5000/vk:1", f"localhost:5000/vk@{DIGEST}"),
    ],
)
def test_a_pin_replaces_the_tag(image: str, pinned: str) -> None:
    assert ImageRef(image=image, digest=DIGEST).pinned() == pinned


def test_a_null_digest_is_never_pinned() -> None:
    with pytest.raises(UsageError, match="has no digest"):
        ImageRef(image="vk:1").pinned()
    with pytest.raises(UsageError, match="has no digest"):
        builder.select(builder.builds(SHIPPED, base=None, pinned=True), [])


def test_pinned_models_need_a_revision() -> None:
    with pytest.raises(UsageError, match=r"models\.qwen35-35b-a3b has no revision"):
        list(builder.builds(SHIPPED, base="base:1", pinned=True))


def test_an_unknown_arm_names_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"no image for arm 'nope'; .*stock"):
        SHIPPED.server("nope")


def test_a_list_with_a_fault_names_the_field(tmp_path: Path) -> None:
    path = tmp_path / "images.yaml"
    path.write_text("schema_version: 1\nbase: {image: a, digest: sha256:short}\nservers: {}\n")
    with pytest.raises(UsageError, match=r"base\.digest"):
        load_catalogue(path)
    with pytest.raises(EnvironmentMissing, match="no list of images"):
        catalogue_file({"FINALBENCH_IMAGES": str(tmp_path / "none.yaml")})


def test_progress_of_a_pull_adds_the_layers() -> None:
    events = [
        {"status": "Pulling from vk"},
        {"status": "Downloading", "id": "a", "progressDetail": {"current": 10, "total": 100}},
        {"status": "Downloading", "id": "b", "progressDetail": {"current": 90, "total": 100}},
        {"status": "Extracting", "id": "a", "progressDetail": {"current": 1, "total": 100}},
        {"status": "Download complete", "id": "a"},
    ]
    assert list(pull_progress("vk", events)) == [
        "pulling vk",
        "pulling vk 10 % of 0 MB",
        "pulling vk 50 % of 0 MB",
        "pulling vk 95 % of 0 MB",
    ]


def test_an_error_in_the_middle_of_a_pull_is_raised() -> None:
    with pytest.raises(DockerException, match="manifest unknown"):
        list(pull_progress("vk", [{"status": "Pulling"}, {"error": "manifest unknown"}]))


@pytest.mark.parametrize(
    ("state", "memory", "words"),
    [
        ({"ExitCode": 3}, None, "exit code 3"),
        ({"ExitCode": 137, "OOMKilled": True}, "1g", "out of memory (limit 1g)"),
        ({"ExitCode": 137}, None, "killed by SIGKILL"),
        ({"ExitCode": 137}, "1g", "killed by SIGKILL, perhaps out of memory (limit 1g)"),
        ({"ExitCode": 139}, None, "killed by SIGSEGV"),
        ({"ExitCode": 127}, None, "exit code 127: its command is not in the image"),
        ({"ExitCode": 255}, None, "exit code 255"),
        ({"ExitCode": 128, "Error": "no space left"}, None, "exit code 128: no space left"),
    ],
)
def test_ends_in_words(state: dict[str, object], memory: str | None, words: str) -> None:
    assert describe_container_exit(state, memory) == words


def test_gpus_follow_the_visible_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    lines = [f"GPU {i}: NVIDIA H200 (UUID: GPU-{i}a0b-11)" for i in range(3)]
    smi.write_text("#!/bin/sh\ncat <<END\n" + "\n".join(lines) + "\nEND\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    every = ["GPU-0a0b-11", "GPU-1a0b-11", "GPU-2a0b-11"]
    assert host_uuids({}) == every
    assert host_uuids({"CUDA_VISIBLE_DEVICES": "2,0"}) == [every[2], every[0]]
    assert host_uuids({"CUDA_VISIBLE_DEVICES": "GPU-1a"}) == [every[1]]
    assert host_uuids({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert choose(every, 2) == every[:2]
    with pytest.raises(EnvironmentMissing, match="4 GPUs asked for, 3 here"):
        choose(every, 4)


def test_compose_runs_what_the_runtime_runs() -> None:
    """The same images under the same restrictions, on ports that only this machine sees."""
    document = yaml.safe_load((ROOT / "containers" / "compose.yaml").read_text())
    assert set(document["services"]) == {"vk", "stock"}
    ports = []
    for name, service in document["services"].items():
        assert service["image"] == SHIPPED.servers[name].image
        assert service["init"] is True and service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["pids_limit"] == container_launch._PIDS
        assert service["entrypoint"] == ["vk-model"]
        assert all(volume.endswith(":ro") for volume in service["volumes"])
        assert service["environment"]["HF_HUB_OFFLINE"].endswith(":-1}")
        ports += service["ports"]
    assert len(set(ports)) == 2 and all(port.startswith("127.0.0.1:") for port in ports)
    profiles = {n: s["environment"]["VK_PROFILE"] for n, s in document["services"].items()}
    assert profiles == {"vk": "vkae", "stock": "stock"}


def test_build_lists_its_images() -> None:
    script = ROOT / "containers" / "build.py"
    done = subprocess.run(
        [sys.executable, str(script), "--list"], capture_output=True, text=True, check=True
    )
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names[:2] == ["vk", "stock"]
    assert "vk-qwen35-35b-a3b" in names
    assert not any(name.startswith("peer-") for name in names)


@pytest.mark.container
def test_thin_images_are_built_over_a_local_base(engine: Daemon) -> None:
    document = SHIPPED.model_dump() | {
        "peers": {"other": {"image": IMAGE, "arms": ["other"], "entry": ["x"]}},
    }
    document["servers"]["vk"]["image"] = IMAGE
    catalogue = Catalogue.model_validate(document)
    found = {w.name: w for w in builder.builds(catalogue, base=None, pinned=False)}
    labels = {"VERSION": "1", "COMMIT": "c", "SOURCE": "s"}
    builder.build(engine.client, found["vk-qwen35-35b-a3b"], extra=labels)
    config = engine.client.images.get("vk-qwen35-35b-a3b:latest").attrs["Config"]
    assert config["Entrypoint"] == ["vk-model"]
    assert not config["Cmd"]  # no further argument is needed
    assert "VK_SOURCE=Qwen/Qwen3.5-35B-A3B" in config["Env"]
    assert config["Labels"]["io.finalbench.model"] == "qwen35-35b-a3b"
    builder.build(engine.client, found["peer-other"], extra=labels)
    config = engine.client.images.get("finalbench/other:1").attrs["Config"]
    assert config["User"] == "10001:10001"
    assert config["Labels"]["io.finalbench.peer"] == "other"
