"""A container engine of the tests' own, and an image that holds nothing.

The image is empty folders and links; the system, the interpreter and the virtual environment are
shown inside read-only, so the real engine runs in a real container and nothing is copied.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml
from docker import DockerClient

ROOT = Path(__file__).parents[2]
TOY_VK = (sys.executable, str(ROOT / "tests" / "e2e" / "toy_vk.py"))
IMAGE = "finalbench-test/host:1"
FOLDERS = ("usr", "sbin", "etc", "proc", "sys", "dev", "tmp", "run", "var")
LINKS = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64"}


@dataclass(frozen=True)
class Daemon:
    """A running dockerd, where it listens, and a client."""

    url: str
    client: DockerClient
    root: Path
    process: subprocess.Popen[bytes]

    def containers(self) -> list[str]:
        """Names of all containers, stopped ones too."""
        return [str(c.name) for c in self.client.containers.list(all=True, ignore_removed=True)]


@contextlib.contextmanager
def running_daemon(*flags: str) -> Iterator[Daemon]:
    """A dockerd of our own; without `flags` it touches neither bridges nor the firewall."""
    network = flags or ("--bridge=none", "--iptables=false", "--ip6tables=false")
    root = Path(tempfile.mkdtemp(prefix="fbd", dir="/tmp"))  # a socket's path must be short
    url = f"unix://{root}/d.sock"
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "dockerd", "-H", url, "--data-root", f"{root}/data", "--exec-root", f"{root}/exec",
                "--pidfile", f"{root}/pid", *network,
            ],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        client = _answering(url, process, root / "log")
        _import_image(client)
        yield Daemon(url, client, root, process)
        if process.poll() is None:  # a test may have killed it
            for container in client.containers.list(all=True, ignore_removed=True):
                container.remove(force=True, v=True)
        client.close()
    finally:
        end_daemon(process, root)


def environment_for(url: str, images: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DOCKER_", "FINALBENCH_"))}
    return kept | {"DOCKER_HOST": url, "FINALBENCH_IMAGES": str(images)}


def images_file(folder: Path, *, entry: tuple[str, ...] | None = None, **fields: object) -> Path:
    """An images.yaml whose every arm is the empty image with this machine's files shown in it."""
    mounts = {"/usr", sys.base_prefix, sys.prefix, str(ROOT / "engine"), str(ROOT / "finalbench")}
    mounts |= {str(ROOT / "scenarios"), str(ROOT / "tests" / "e2e")}
    server: Mapping[str, object] = {
        "image": IMAGE,
        "arms": ["vk", "stock"],
        "entry": list(entry or (f"{sys.prefix}/bin/vk",)),
        "mounts": sorted(path for path in mounts if path != "/usr/local" or "/usr" not in mounts),
        "environment": {"PATH": "/usr/bin:/bin"},
        **fields,
    }
    document = {"schema_version": 1, "base": {"image": IMAGE}, "servers": {"any": server}}
    path = folder / "images.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def install_dockerd() -> None:
    if shutil.which("dockerd"):
        return
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "docker.io"]
    quiet_apt = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], env=quiet_apt, **quiet)
    subprocess.run(install, env=quiet_apt, **quiet)


def _answering(url: str, process: subprocess.Popen[bytes], log: Path) -> DockerClient:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(url.removeprefix("unix://"))
            return DockerClient(base_url=url, timeout=60)
        time.sleep(0.05)
    raise RuntimeError(f"dockerd does not answer:\n{log.read_text()[-2000:]}")


def _import_image(client: DockerClient) -> None:
    repository, _, tag = IMAGE.rpartition(":")
    client.api.import_image_from_data(empty_image(), repository=repository, tag=tag)


def empty_image() -> bytes:
    """Folders to mount into, and the links that a merged /usr has."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name in FOLDERS:
            folder = tarfile.TarInfo(name)
            folder.type = tarfile.DIRTYPE
            folder.mode = 0o1777 if name == "tmp" else 0o755
            tar.addfile(folder)
        for name, target in LINKS.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
    return data.getvalue()


def end_daemon(process: subprocess.Popen[bytes], root: Path) -> None:
    """End it and what it started, unmount what it left, delete its folder."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(3)  # its containers are gone, and its data goes too: nothing to wait for
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
    for child in psutil.process_iter(["cmdline"]):
        # Shims outlive a daemon that was killed.
        if any(str(root) in word for word in child.info["cmdline"] or []):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if (place := line.split()[1]).startswith(f"{root}/"):
            subprocess.run(["umount", "-l", place], check=False)
    shutil.rmtree(root, ignore_errors=True)
