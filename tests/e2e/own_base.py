"""A base image made of this machine's own Python, so that our Dockerfiles build without a registry.

It holds what the build's commands need: a shell, Python, its libraries, and the few packages that
pip and `vk --help` take. torch and the rest are shown inside when a container runs, read-only.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from docker import DockerClient
from own_daemon import ROOT

BASE = "finalbench-test/python:1"
_TOOLS = ("sh", "mkdir", "touch", "chmod", "cat")
_PACKAGES = ("setuptools", "typer", "annotated-doc", "shellingham", "click", "rich", "pygments")
_BUILD_PACKAGES = "/opt/build-packages"
_STDLIB_LEFT_OUT = {"site-packages", "test", "idlelib", "tkinter", "turtledemo", "lib2to3"}
SITE = sysconfig.get_paths()["purelib"]


def build_bases(url: str, client: DockerClient) -> None:
    """`vk`, `stock` and the thin image of vk-tiny, by the command that `make images` runs."""
    repository, _, tag = BASE.rpartition(":")
    path = f"ENV PATH={sys.base_prefix}/bin:/usr/bin PYTHONPATH={_BUILD_PACKAGES}"
    client.api.import_image_from_data(_tar(), repository=repository, tag=tag, changes=[path])
    words = [sys.executable, str(ROOT / "containers" / "build.py"), "vk", "stock", "vk-vk-tiny"]
    words += ["--base", BASE, "--network", "host", "--source", "test", "--stock-kernels", ""]
    words += ["--pip-arguments=--no-deps --no-build-isolation --no-index"]
    environment = os.environ | {"DOCKER_HOST": url}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "finalbench/vk:0.1.0",
        "finalbench/stock:0.1.0",
        "vk-vk-tiny:0.1.0",
    ]


def _tar() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name in ("usr/bin", "usr/lib", "usr/lib64", "etc", "opt", "var", "proc", "sys", "dev"):
            tar.addfile(_folder(name))
        tar.addfile(_folder("tmp", 0o1777))
        for name in ("bin", "lib", "lib64"):
            tar.addfile(_link(name, f"usr/{name}"))
        tar.addfile(_link("usr/bin/python3", _python()))
        binaries = []
        for name in _TOOLS:
            path = Path(shutil.which(name) or "").resolve()
            tar.add(path, f"usr/bin/{name}")
            binaries.append(path)
        for path, inside in (*_interpreter(), *_packages()):
            tar.add(path, inside.lstrip("/"), recursive=False)
            if ".so" in path.name or path.parent.name == "bin":
                binaries.append(path)
        # Last on the path, so that what the image itself installed comes first.
        _text(tar, f"{_BUILD_PACKAGES}/sitecustomize.py", f"import sys; sys.path.append({SITE!r})")
        for library in sorted(_libraries([*binaries, *_torch()])):
            # Libraries lie where the loader of the merged /usr looks for them.
            tar.add(library.resolve(), re.sub(r"^/?(?=lib)", "usr/", str(library).lstrip("/")))
    return data.getvalue()


def _python() -> str:
    return str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")


def _interpreter() -> Iterator[tuple[Path, str]]:
    yield Path(_python()).resolve(), _python()
    for path in sorted((Path(sys.base_prefix) / "lib").glob("libpython3*.so*")):
        yield path, str(path)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(stdlib.rglob("*")):
        parts = path.relative_to(stdlib).parts
        if path.is_file() and not _STDLIB_LEFT_OUT.intersection(parts):
            yield path, str(path)


def _packages() -> Iterator[tuple[Path, str]]:
    for name in _PACKAGES:
        try:
            files = metadata.distribution(name).files or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            path = Path(str(file.locate()))
            if path.is_file() and not str(file).startswith(".."):
                yield path, f"{_BUILD_PACKAGES}/{file}"


def _torch() -> list[Path]:
    return sorted((Path(SITE) / "torch" / "lib").glob("*.so*"))


def _libraries(binaries: list[Path]) -> set[Path]:
    """What the loader would take from the system for all of them."""
    told = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False)
    found = set(re.findall(r"(?:=> |\t)(/(?:usr/)?lib\S*)", told.stdout))
    return {Path(name) for name in found if Path(name).exists()}


def _text(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name.lstrip("/"))
    entry.size = len(text)
    tar.addfile(entry, io.BytesIO(text.encode()))


def _folder(name: str, mode: int = 0o755) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    return entry


def _link(name: str, target: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    return entry
