"""What can be seen in the kernels' source alone, without a GPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

OPS = Path(__file__).parents[2] / "engine" / "vkengine" / "ops"
SOURCES = sorted(OPS.rglob("*triton*.py")) + sorted(OPS.rglob("grouped.py"))
SOURCES += sorted(OPS.rglob("chunk.py")) + sorted(OPS.rglob("rowwise.py"))


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function that Triton compiles."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                yield f"{path.parent.name}/{path.name}:{node.name}", node


KERNELS = dict(kernels())


def calls(node: ast.AST) -> list[str]:
    return [ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)]


def test_the_kernels_are_found() -> None:
    assert len(KERNELS) > 20
    assert any("down_kernel" in name for name in KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_e81_an_expert_id_is_widened_before_it_is_multiplied(name: str) -> None:
    """512 x 4096 x 2048 elements do not fit 32 bits."""
    wide: set[str] = set()
    for node in ast.walk(KERNELS[name]):
        if isinstance(node, ast.Assign) and "int64" in ast.unparse(node.value):
            wide |= {ast.unparse(target) for target in node.targets}
    for node in ast.walk(KERNELS[name]):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for side in (node.left, node.right):
                text = ast.unparse(side)
                if text.split("[")[0] in {"expert", "experts"}:
                    assert text.split("[")[0] in wide, f"{ast.unparse(node)} in 32 bits"


def _called(node: ast.AST) -> set[str]:
    return {call.rpartition(".")[2] for call in calls(node)}


def _waiting() -> set[str]:
    """`gdc_wait` and every function that comes to call it."""
    found = {"gdc_wait"}
    for _ in KERNELS:
        found |= {name.rpartition(":")[2] for name, k in KERNELS.items() if _called(k) & found}
    return found


WAITING = _waiting()


def waits(node: ast.AST) -> bool:
    """Whether a wait for the kernel before is in there, or in a function that it calls."""
    return bool(_called(node) & WAITING)


@pytest.mark.parametrize("name", KERNELS)
def test_e102_a_wait_for_the_kernel_before_stands_in_no_loop(name: str) -> None:
    """Inside a pipelined loop a load may be moved before it."""
    for loop in ast.walk(KERNELS[name]):
        if isinstance(loop, (ast.For, ast.While)):
            unrolled = isinstance(loop, ast.For) and "static_range" in ast.unparse(loop.iter)
            assert unrolled or not waits(loop), name


@pytest.mark.parametrize("name", KERNELS)
def test_e104_a_kernel_that_may_overlap_waits(name: str) -> None:
    """A launch with overlap is for kernels that wait themselves or in a function they call."""
    kernel = KERNELS[name]
    if "PDL" in [argument.arg for argument in kernel.args.args]:
        assert waits(kernel), name


def test_e108_no_kernel_is_tuned_while_it_runs() -> None:
    """Settings are fixed tables, so the interpreter runs what the GPU runs."""
    for path in SOURCES:
        text = path.read_text("utf-8")
        assert "autotune" not in text and "interpret=" not in text, path
