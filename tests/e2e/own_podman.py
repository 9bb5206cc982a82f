"""Podman's Docker-compatible service, started by the tests on a socket of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import requests
from docker import DockerClient
from own_daemon import Daemon, empty_image, end_daemon

# Its default runtime needs ulimits and a cgroup version that not every machine gives.
_CONFIG = """[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


_INIT = "/usr/libexec/podman/catatonit"  # what `init` is there


def install_podman() -> None:
    if shutil.which("podman") and shutil.which("runc") and Path(_INIT).exists():
        return
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    apt = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends"]
    install += ["podman", "runc", "catatonit"]
    subprocess.run(["apt-get", "update", "-qq"], env=apt, **quiet)
    subprocess.run(install, env=apt, **quiet)


@contextlib.contextmanager
def running_podman() -> Iterator[tuple[Daemon, str]]:
    """The service, and the id of the empty image in it (an import there loses its name)."""
    root = Path(tempfile.mkdtemp(prefix="fbp", dir="/tmp"))
    (root / "containers.conf").write_text(_CONFIG)
    url = f"unix://{root}/p.sock"
    command = ["podman", "--root", f"{root}/root", "--runroot", f"{root}/run"]
    command += ["system", "service", "--time=0", url]
    environment = os.environ | {"CONTAINERS_CONF": str(root / "containers.conf")}
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        client = _answering(url, process, root / "log")
        before = {str(image.id) for image in client.images.list(all=True)}
        client.api.import_image_from_data(empty_image(), repository="localhost/host", tag="1")
        [image] = {str(image.id) for image in client.images.list(all=True)} - before
        yield Daemon(url, client, root, process), image
        for container in client.containers.list(all=True, ignore_removed=True):
            container.remove(force=True, v=True)
        client.close()
    finally:
        end_daemon(process, root)


def _answering(url: str, process: subprocess.Popen[bytes], log: Path) -> DockerClient:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if Path(url.removeprefix("unix://")).exists():
            client = DockerClient(base_url=url, timeout=60)
            with contextlib.suppress(requests.RequestException):
                client.ping()
                return client
        time.sleep(0.1)
    raise RuntimeError(f"podman does not answer:\n{log.read_text()[-2000:]}")
