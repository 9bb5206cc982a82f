"""A wheel must hold every package; setuptools is told them by name because scenarios/ lies outside."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        ".".join(p.parent.relative_to(ROOT).parts)
        for p in (ROOT / "finalbench").rglob("__init__.py")
    }
    assert listed == found | {"finalbench.scenarios"}
