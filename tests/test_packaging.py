"""A wheel must hold every package; they are listed by name, since scenarios/ lies outside."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {
        ".".join(p.parent.relative_to(ROOT).parts)
        for p in (ROOT / "finalbench").rglob("__init__.py")
    }
    assert listed == found | {"finalbench.scenarios"}
