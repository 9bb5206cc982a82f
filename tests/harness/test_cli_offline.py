"""`doctor --offline`: what must be here before the network is gone, without asking anybody."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from finalbench.cli.doctor import Check
from finalbench.cli.offline import check_offline


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: socket.socket, address: object) -> None:
        assert isinstance(address, str), f"asked {address}"  # a unix socket is not a network
        raise FileNotFoundError(address)

    monkeypatch.setattr(socket.socket, "connect", refused)


def cache(root: Path, *files: str) -> dict[str, str]:
    folder = root / "hub" / "models--Qwen--Qwen3.5-35B-A3B" / "snapshots" / "rev"
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text("{}")
    return {"HF_HOME": str(root), "PATH": "/usr/bin:/bin"}


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_weights_are_looked_for_in_the_cache(tmp_path: Path) -> None:
    environment = cache(tmp_path, "config.json", "model.safetensors")
    found = by_name(check_offline(environment, ["qwen35-35b-a3b", "vk-tiny"]))
    assert found["weights qwen35-35b-a3b"].status == "ok"
    assert found["weights vk-tiny"].text == "come with the engine"
    assert found["calls home"].status == "ok"


def test_missing_weights_fail_only_where_they_were_asked_for(tmp_path: Path) -> None:
    environment = {"HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    asked = by_name(check_offline(environment, ["qwen35-35b-a3b"]))
    assert asked["weights qwen35-35b-a3b"].status == "FAIL"
    assert "hf download Qwen/Qwen3.5-35B-A3B" in asked["weights qwen35-35b-a3b"].text
    every = by_name(check_offline(environment, []))
    assert every["weights qwen35-35b-a3b"].status == "warn"
    assert every["images"].status == "warn" and "process" in every["images"].text


def test_a_link_to_nothing_is_no_checkpoint(tmp_path: Path) -> None:
    environment = cache(tmp_path, "config.json")
    folder = next(tmp_path.rglob("config.json")).parent
    (folder / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    [check] = [c for c in check_offline(environment, ["qwen35-35b-a3b"]) if "weights" in c.name]
    assert check.status == "FAIL" and "link to nothing" in check.text


def test_online_mode_is_warned_about(tmp_path: Path) -> None:
    environment = {"HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "0"}
    assert by_name(check_offline(environment, ["vk-tiny"]))["calls home"].status == "warn"
