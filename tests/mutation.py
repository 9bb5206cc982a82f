"""Change the judging modules one small thing at a time; the tests must notice each change.

    python tests/mutation.py [--sample N] [--module PART] [--jobs N] [--again OUTPUT] [--list]

Each mutant runs in a fork of one warm process, in which the changed source stands in for the real
one. Prints survivors, and a table for docs/methodology.md; exit 1 when a survivor is not known to
be equivalent (`tests/mutation_equivalent.txt`).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
HARNESS = ROOT / "tests" / "harness"
EQUIVALENT = ROOT / "tests" / "mutation_equivalent.txt"
TIMEOUT_S = 180
TESTS: dict[str, tuple[str, ...]] = {
    "stats": ("test_stats_planning.py", "test_stats_paired.py", "test_stats_unpaired.py"),
    "metrics": ("test_metrics.py", "test_metrics_bandwidth.py", "test_metrics_foreign.py"),
    "equality": ("test_equality.py",),
    "validity": ("test_validity.py",),
    "bundle": ("test_bundle.py",),
}

COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """`number` is the index of the change in its file; `text` the line it stands on."""

    path: Path
    number: int
    line: int
    what: str
    text: str

    @property
    def key(self) -> str:
        return f"{self.path.relative_to(ROOT)} | {self.text} | {self.what}"


class Changer(ast.NodeTransformer):
    """Makes change number `target`, or only counts when it is None."""

    def __init__(self, target: int | None) -> None:
        self.target = target
        self.found: list[tuple[int, str]] = []

    def _take(self, node: ast.AST, what: str) -> bool:
        self.found.append((getattr(node, "lineno", 0), what))
        return len(self.found) - 1 == self.target

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        for index, op in enumerate(node.ops):
            new = COMPARE[type(op)]
            if self._take(node, f"{type(op).__name__} to {new.__name__}"):
                node.ops[index] = new()
        self.generic_visit(node)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        new = BINARY.get(type(node.op))
        if new is not None and self._take(node, f"{type(node.op).__name__} to {new.__name__}"):
            node.op = new()
        self.generic_visit(node)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        new = ast.Or if isinstance(node.op, ast.And) else ast.And
        if self._take(node, f"{type(node.op).__name__} to {new.__name__}"):
            node.op = new()
        self.generic_visit(node)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not | ast.USub) and self._take(
            node, f"drop {type(node.op).__name__}"
        ):
            return node.operand
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._take(node, f"{node.value} to {not node.value}"):
                return ast.copy_location(ast.Constant(not node.value), node)
        elif isinstance(node.value, int | float) and self._take(node, f"{node.value} plus 1"):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node

    def _condition(self, node: ast.If | ast.IfExp | ast.While) -> ast.AST:
        if not isinstance(node.test, ast.Compare | ast.UnaryOp) and self._take(
            node.test, "negate condition"
        ):
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        self.generic_visit(node)
        return node

    visit_If = visit_IfExp = visit_While = _condition

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        for index, test in enumerate(node.ifs):
            if self._take(test, "drop filter"):
                node.ifs[index] = ast.copy_location(ast.Constant(True), test)
                return node
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # Text for readers is compared where it matters; its format numbers are no logic.
        if isinstance(node.func, ast.Name) and node.func.id in ("Field", "Literal"):
            return node
        self.generic_visit(node)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        # Lengths are checked where they can differ; `strict` says so to the reader.
        if node.arg != "strict":
            self.generic_visit(node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(part) for part in node.body]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = [self.visit(part) for part in node.body]
        node.args.kw_defaults = [d and self.visit(d) for d in node.args.kw_defaults]
        return node


def mutants(path: Path) -> list[Mutant]:
    source = path.read_text()
    lines = source.splitlines()
    changer = Changer(None)
    changer.visit(ast.parse(source))
    found = []
    for number, (line, what) in enumerate(changer.found):
        text = lines[line - 1].strip()
        if text != "if TYPE_CHECKING:":
            found.append(Mutant(path, number, line, what, text))
    return found


class Stand(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from changed code and leaves all others alone."""

    def __init__(self, mutant: Mutant) -> None:
        relative = mutant.path.relative_to(ROOT).with_suffix("")
        self.package = relative.name == "__init__"
        self.name = ".".join(relative.parent.parts if self.package else relative.parts)
        self.path = mutant.path
        tree = ast.parse(mutant.path.read_text())
        changed = ast.fix_missing_locations(Changer(mutant.number).visit(tree))
        self.code = compile(changed, str(mutant.path), "exec")

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(
            fullname,
            self.path,
            loader=self,
            submodule_search_locations=[str(self.path.parent)] if self.package else None,
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: object) -> None:
        exec(self.code, vars(module))


def warm() -> None:
    """Everything the tests import but the modules that change."""
    import hypothesis
    import pytest
    import scipy.special
    import scipy.stats

    import finalbench.arms
    import finalbench.client.ceiling
    import finalbench.record

    kept = (hypothesis, pytest, scipy.special, scipy.stats, finalbench.record)
    assert all(kept)


def run_child(mutant: Mutant, part: str) -> None:
    """Never returns; exit 0 means that the tests noticed nothing."""
    import pytest

    with open(os.devnull, "w") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    os.setpgid(0, 0)
    code = 1
    with contextlib.suppress(BaseException):
        sys.meta_path.insert(0, Stand(mutant))
        tests = [str(HARNESS / name) for name in TESTS[part]]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain"]
        code = int(pytest.main([*options, *tests]))
    os._exit(0 if code == 0 else 1)


def run_all(chosen: list[tuple[str, Mutant]], jobs: int) -> Iterator[tuple[str, Mutant, bool]]:
    """Yields (part, mutant, survived) as mutants finish."""
    waiting, running = list(reversed(chosen)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            part, mutant = waiting.pop()
            pid = os.fork()
            if pid == 0:
                run_child(mutant, part)
            running[pid] = (part, mutant, time.monotonic())
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            part, mutant, _ = running.pop(pid)
            yield part, mutant, os.waitstatus_to_exitcode(status) == 0
            continue
        for child, (_, _, started) in running.items():
            if time.monotonic() - started > TIMEOUT_S:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--sample", type=int, help="at most this many mutants of each part")
    options.add_argument("--module", help="only files whose path contains this")
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--again", type=Path, help="only the survivors that this output names")
    options.add_argument("--list", action="store_true", help="only list the mutants")
    chosen_options = options.parse_args()
    known = set(EQUIVALENT.read_text().splitlines()) if EQUIVALENT.exists() else set()
    chosen: list[tuple[str, Mutant]] = []
    for part in TESTS:
        found = [m for p in sorted((ROOT / "finalbench" / part).glob("*.py")) for m in mutants(p)]
        if chosen_options.module:
            found = [m for m in found if chosen_options.module in str(m.path)]
        if chosen_options.again:
            text = chosen_options.again.read_text()
            found = [m for m in found if f": {m.key}\n" in text]
        if chosen_options.sample and len(found) > chosen_options.sample:
            found = random.Random(chosen_options.seed).sample(found, chosen_options.sample)
        chosen += [(part, m) for m in found]
    if chosen_options.list:
        for part, mutant in chosen:
            sys.stdout.write(f"{part}: {mutant.line}: {mutant.key}\n")
        return 0
    sys.path.insert(0, str(ROOT))
    warm()
    sys.path.insert(0, str(HARNESS))
    for part in sorted({part for part, _ in chosen}):
        control = Mutant(ROOT / "finalbench" / part / "__init__.py", -1, 0, "nothing", "")
        if not all(survived for _, _, survived in run_all([(part, control)], 1)):
            sys.stdout.write(f"{part}: its tests fail without any change\n")
            return 2
    counts = {part: [0, 0, 0] for part in TESTS}
    unknown = 0
    for part, mutant, survived in run_all(chosen, chosen_options.jobs):
        equivalent = mutant.key in known
        counts[part][0] += 1
        counts[part][1] += survived and equivalent
        counts[part][2] += survived and not equivalent
        if survived and not equivalent:
            unknown += 1
            sys.stdout.write(f"survived: line {mutant.line}: {mutant.key}\n")
            sys.stdout.flush()
    sys.stdout.write(
        "\n| part | mutants | killed | equivalent | survived |\n|---|---:|---:|---:|---:|\n"
    )
    for part, (total, same, alive) in counts.items():
        if total:
            sys.stdout.write(f"| {part} | {total} | {total - same - alive} | {same} | {alive} |\n")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
