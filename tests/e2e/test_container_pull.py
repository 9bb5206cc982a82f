"""An image pulled from a real registry on this machine: progress, digest, and a pin that holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_daemon import TOY_VK, Daemon, environment_for, images_file

from finalbench.arms import server_settings
from finalbench.errors import EnvironmentMissing
from finalbench.runtime.container import ContainerRuntime
from finalbench.runtime.process import choose_port
from finalbench.runtime.server import Wanted
from finalbench.scenario import load_scenario, parse_override

pytestmark = [pytest.mark.container, pytest.mark.nightly]  # installs docker-registry

CONFIG = """version: 0.1
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not shutil.which("docker-registry"):
        apt = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "docker-registry"]
        subprocess.run(["apt-get", "update", "-qq"], check=True, stdout=subprocess.DEVNULL)
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(apt, check=True, env=quiet, stdout=subprocess.DEVNULL)
    folder, port = tmp_path_factory.mktemp("registry"), choose_port()
    config = folder / "config.yml"
    config.write_text(CONFIG.format(root=folder / "data", port=port))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(config)], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        answering(f"http://127.0.0.1:{port}/v2/")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def answering(url: str) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


def pushed(engine: Daemon, registry: str, folder: Path) -> tuple[str, str]:
    """An image with a layer worth a progress line, in the registry, no longer here; its digest."""
    (folder / "Dockerfile").write_text("FROM finalbench-test/host:1\nCOPY big /big\n")
    (folder / "big").write_bytes(os.urandom(24 << 20))
    name = f"{registry}/finalbench/toy:1"
    engine.client.images.build(path=str(folder), tag=name)
    engine.client.images.push(name.rpartition(":")[0], tag="1")
    [digest] = engine.client.images.get(name).attrs["RepoDigests"]
    engine.client.images.remove(name)
    return name, digest.partition("@")[2]


def runtime(
    engine: Daemon, folder: Path, pinned: bool = False, **fields: object
) -> ContainerRuntime:
    inside = {"PATH": "/usr/bin:/bin", "TOY": "fast"}
    path = images_file(folder, entry=TOY_VK, environment=inside, **fields)
    return ContainerRuntime.open(environment_for(engine.url, path), pinned=True)


def test_a_missing_image_is_pulled_by_its_digest_with_progress(
    engine: Daemon, registry: str, tmp_path: Path
) -> None:
    name, digest = pushed(engine, registry, tmp_path)
    found = runtime(engine, tmp_path, image=name, digest=digest)
    assert found.missing(["vk"]) == [name]
    told: list[str] = []
    found.prepare(["vk"], told.append)
    shares = [int(line.split()[2]) for line in told if line.endswith("MB")]
    assert shares == sorted(shares) and len(shares) >= 2 and shares[-1] == 100
    settings = server_settings(
        "vk", load_scenario("vk-tiny", [parse_override("serving.threads=1")])
    )
    server = found.start(settings, Wanted("vk", "test-run", tmp_path / "vk.log", 60))
    try:
        assert server.image_digest == f"{name.rpartition(':')[0]}@{digest}"
    finally:
        server.stop()


def test_a_digest_that_the_registry_does_not_have(
    engine: Daemon, registry: str, tmp_path: Path
) -> None:
    name, _ = pushed(engine, registry, tmp_path)
    found = runtime(engine, tmp_path, image=name, digest="sha256:" + "a" * 64)
    with pytest.raises(EnvironmentMissing, match=r"cannot be pulled: .*manifest"):
        found.prepare(["vk"], lambda line: None)
