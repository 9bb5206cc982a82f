"""Podman's socket instead of Docker's: the same runtime, and a request it drops unsaid."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_daemon import TOY_VK, Daemon, environment_for, images_file
from own_podman import install_podman, running_podman

from finalbench.arms import Settings, server_settings
from finalbench.errors import EnvironmentMissing
from finalbench.runtime.container import ContainerRuntime
from finalbench.runtime.server import Wanted
from finalbench.scenario import load_scenario, parse_override

pytestmark = pytest.mark.nightly  # installs podman, and needs what a container may not allow


@pytest.fixture(scope="module")
def podman() -> Iterator[tuple[Daemon, str]]:
    if os.geteuid() != 0:
        pytest.skip("a podman service of its own needs root")
    install_podman()
    with running_podman() as found:
        yield found


def runtime(podman: tuple[Daemon, str], folder: Path, entry: tuple[str, ...]) -> ContainerRuntime:
    engine, image = podman
    inside = {"PATH": "/usr/bin:/bin", "TOY": "fast"}
    path = images_file(folder, entry=entry, environment=inside, image=image)
    return ContainerRuntime.open(environment_for(engine.url, path))


def settings(**changes: str | int | None) -> Settings:
    scenario = load_scenario("vk-tiny", [parse_override("serving.threads=1")])
    return server_settings("vk", scenario) | changes


@pytest.mark.parametrize("entry", [TOY_VK, (f"{sys.prefix}/bin/vk",)], ids=["toy", "real"])
def test_a_server_starts_answers_and_goes(
    podman: tuple[Daemon, str], tmp_path: Path, entry: tuple[str, ...]
) -> None:
    found = runtime(podman, tmp_path, entry)
    assert found.describe().startswith("Podman ")
    server = found.start(settings(), Wanted("vk", "test-run", tmp_path / "vk.log", 120))
    try:
        assert server.settings["nonce"] == server.nonce != ""
        assert server.died() is None
        assert len(podman[0].containers()) == 1
    finally:
        server.stop()
    assert podman[0].containers() == []


def test_a_container_without_its_gpu_is_refused_before_any_traffic(
    podman: tuple[Daemon, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is faked but the machine's list of GPUs: Podman itself drops the device request."""
    monkeypatch.setattr("finalbench.runtime.container_gpu.host_uuids", lambda env: ["GPU-0a"])
    monkeypatch.setattr("finalbench.runtime.container.wait_ready", lambda *a, **k: pytest.fail())
    with pytest.raises(EnvironmentMissing, match="sees no GPU, although 1 were asked for"):
        runtime(podman, tmp_path, TOY_VK).start(
            settings(device="cuda"), Wanted("vk", "test-run", tmp_path / "vk.log", 60)
        )
    assert podman[0].containers() == []


def test_a_killed_server_is_told_in_words(podman: tuple[Daemon, str], tmp_path: Path) -> None:
    found = runtime(podman, tmp_path, TOY_VK)
    server = found.start(settings(), Wanted("vk", "test-run", tmp_path / "vk.log", 60))
    podman[0].client.containers.get(podman[0].containers()[0]).kill()
    for _ in range(100):
        if (reason := server.died()) is not None:
            break
    assert reason is not None and "the server ended" in reason
    server.stop()
    assert podman[0].containers() == []
