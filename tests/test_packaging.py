"""A wheel must hold every package by name, and the data that lies outside of `finalbench/`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_package_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {
        ".".join(p.parent.relative_to(ROOT).parts)
        for p in (ROOT / "finalbench").rglob("__init__.py")
    }
    assert listed == found | {"finalbench.scenarios", "finalbench.containers"}


@pytest.mark.slow
def test_the_wheel_holds_what_lies_outside(tmp_path: Path) -> None:
    """An installed finalbench runs without a checkout: scenarios, shapes, images, templates."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("finalbench", "scenarios", "containers"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta; build_meta.build_wheel('out')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    [wheel] = (source / "out").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "finalbench/containers/images.yaml",
        "finalbench/scenarios/vk-tiny.yaml",
        "finalbench/scenarios/shapes/qwen35-35b-a3b/config.json",
        "finalbench/report/templates/report.html.j2",
        "finalbench/report/templates/style.css",
    } <= names
    # ... and finds its list of images there.
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "from finalbench.runtime.container_images import catalogue_file, load_catalogue\n"
        "path = catalogue_file({}); print(path, load_catalogue(path).server('vllm').image)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(str(site)) and "vllm/vllm-openai" in done.stdout
