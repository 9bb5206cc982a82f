"""The layering rules of docs/structure.md, read from the import statements."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Smaller may be imported by larger, never the reverse. `errors`, `stats` and `provenance` are free.
LAYER = {
    "scenario": 1,
    "plan": 2,
    "runtime": 3,
    "arms": 1,
    "prompts": 4,
    "client": 4,
    "record": 5,
    "runner": 6,
    "metrics": 7,
    "validity": 7,
    "equality": 7,
    "bundle": 8,
    "aggregate": 9,
    "claims": 9,
    "report": 10,
    "gate": 10,
    "hub": 10,
}
FREE = {"errors", "stats", "provenance", "scenarios", "containers"}
TOP = {"cli", "__main__", "runner"}
HARNESS_FORBIDDEN = {"torch", "triton", "transformers", "vkengine"}
ENGINE_FORBIDDEN = {"finalbench", "docker", "pandas", "huggingface_hub"}


def imported(path: Path) -> set[str]:
    """Absolute names that a file imports, at any depth of its code."""
    names: set[str] = set()
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{prefix}.{alias.name}" for alias in node.names)
            names.add(prefix)
    return names


def part_of(name: str) -> str | None:
    pieces = name.split(".")
    return pieces[1] if pieces[0] == "finalbench" and len(pieces) > 1 else None


def harness_files() -> list[Path]:
    return sorted((ROOT / "finalbench").rglob("*.py"))


def engine_files() -> list[Path]:
    return sorted((ROOT / "engine" / "vkengine").rglob("*.py"))


@pytest.mark.parametrize("path", harness_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_harness_layers(path: Path) -> None:
    names = imported(path)
    assert not {n.split(".")[0] for n in names} & HARNESS_FORBIDDEN
    relative = path.relative_to(ROOT / "finalbench")
    own = relative.parts[0].removesuffix(".py")
    for name in names:
        other = part_of(name)
        if other is None or other == own or own in TOP:
            continue
        assert other not in TOP, f"{own} imports {other}"
        if own in LAYER and other in LAYER:
            assert LAYER[other] <= LAYER[own], (
                f"{own} ({LAYER[own]}) imports {other} ({LAYER[other]})"
            )


@pytest.mark.parametrize("path", engine_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_engine_knows_no_harness(path: Path) -> None:
    assert not {n.split(".")[0] for n in imported(path)} & ENGINE_FORBIDDEN


def test_every_harness_module_has_a_layer() -> None:
    parts = {
        p.relative_to(ROOT / "finalbench").parts[0].removesuffix(".py") for p in harness_files()
    }
    assert parts - set(LAYER) - FREE - TOP - {"__init__", "testing"} == set()


def limit_of(path: Path) -> int:
    if "triton" in path.name:
        return 10_000  # kernels are as long as they need
    return 350 if "models" in path.parts else 300


def test_modules_stay_small() -> None:
    """300 lines a module, 350 a model file."""
    long = {
        str(p.relative_to(ROOT)): count
        for p in [*harness_files(), *engine_files()]
        if (count := len(p.read_text().splitlines())) > limit_of(p)
    }
    assert long == {}
