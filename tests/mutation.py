"""Change the judging modules one small thing at a time; the tests must notice each change.

    python tests/mutation.py [--sample N] [--module PART] [--jobs N] [--again OUTPUT] [--list]

A part's tests are collected once; each mutant then runs in a fork in which a function's code is
replaced, tests that noticed most first. What runs at import (constants, defaults, fields), and
what survived, is imported and tested anew in a fork. Prints survivors, and a table for
docs/methodology.md; exit 1 when a survivor is not known to be equivalent
(`tests/mutation_equivalent.txt`).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]
HARNESS = ROOT / "tests" / "harness"
EQUIVALENT = ROOT / "tests" / "mutation_equivalent.txt"
TIMEOUT_S = 180
TESTS: dict[str, tuple[str, ...]] = {
    "stats": (
        "test_stats_planning.py",
        "test_stats_paired.py",
        "test_stats_unpaired.py",
        "test_stats_steady.py",
    ),
    "metrics": (
        "test_metrics.py",
        "test_metrics_bandwidth.py",
        "test_metrics_foreign.py",
        "test_cache_state.py",
    ),
    "equality": ("test_equality.py",),
    "validity": ("test_validity.py", "test_cache_state.py", "test_rule_pairs.py"),
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
        self.code = changed_code(mutant.path, mutant.number)

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


@functools.cache
def unchanged_code(path: Path) -> CodeType:
    return changed_code(path, None)


def changed_code(path: Path, number: int | None) -> CodeType:
    tree = Changer(number).visit(ast.parse(path.read_text()))
    return compile(ast.fix_missing_locations(tree), str(path), "exec")


Patch = dict[tuple[str, int], CodeType]


def patch_of(mutant: Mutant) -> Patch | None:
    """New code by (qualified name, line) of a function; None when it runs at import."""
    patch: Patch = {}

    def compare(old: CodeType, new: CodeType) -> bool:
        if not old.co_flags & inspect.CO_NEWLOCALS:  # a module or the body of a class
            plain = [[c for c in k.co_consts if not isinstance(c, CodeType)] for k in (old, new)]
            # As text: 1, 1.0 and True are equal to each other and are not the same.
            if old.co_code != new.co_code or repr(plain[0]) != repr(plain[1]):
                return False
            parts = [[c for c in k.co_consts if isinstance(c, CodeType)] for k in (old, new)]
            return len(parts[0]) == len(parts[1]) and all(map(compare, *parts))
        if new.co_name.startswith("<") and new.co_name != "<lambda>":
            return old == new  # a comprehension outside of any function
        if old != new:
            patch[new.co_qualname, new.co_firstlineno] = new
        return True

    good = compare(unchanged_code(mutant.path), changed_code(mutant.path, mutant.number))
    return patch if good and patch else None


def warm() -> None:
    """What the tests import, the modules that change aside."""
    import hypothesis
    import pydantic
    import pytest
    import scipy.special
    import scipy.stats

    kept = (hypothesis, pydantic, pytest, scipy.special, scipy.stats)
    assert all(kept)
    # A mutant is noticed by the first failing example; the smallest one is of no use here.
    hypothesis.settings.register_profile(
        "mutation",
        database=None,
        derandomize=True,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    )
    hypothesis.settings.load_profile("mutation")


OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-s"]
OPTIONS += ["--assert=plain", "--tb=native", "-o", "timeout=0"]


def arguments(part: str) -> list[str]:
    return [*OPTIONS, *(str(HARNESS / name) for name in TESTS[part])]


class Forks:
    """Runs one mutant per fork. A child exits 0 when nothing noticed, else with 1."""

    def __init__(self, jobs: int, timeout_s: float) -> None:
        self.jobs, self.timeout_s = jobs, timeout_s
        self._running: dict[int, tuple[Mutant, float, int]] = {}

    def run(
        self, chosen: list[Mutant], child: Callable[[Mutant, int], bool]
    ) -> Iterator[tuple[Mutant, bool, bytes]]:
        """Yields (mutant, survived, what the child wrote). `child` is true when none noticed."""
        waiting = list(reversed(chosen))
        while waiting or self._running:
            while waiting and len(self._running) < self.jobs:
                self._fork(waiting.pop(), child)
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                mutant, _, pipe = self._running.pop(pid)
                said = os.read(pipe, 4096)
                os.close(pipe)
                yield mutant, os.waitstatus_to_exitcode(status) == 0, said
                continue
            for running, (_, started, _) in self._running.items():
                if time.monotonic() - started > self.timeout_s:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(running, signal.SIGKILL)
            time.sleep(0.005)

    def _fork(self, mutant: Mutant, child: Callable[[Mutant, int], bool]) -> None:
        read, write = os.pipe()
        pid = os.fork()
        if pid:
            os.close(write)
            self._running[pid] = (mutant, time.monotonic(), read)
            return
        with open(os.devnull, "w") as nothing:  # noqa: PTH123
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        os.setpgid(0, 0)
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if child(mutant, write) else 1
        os._exit(code)


def run_from_import(part: str) -> Callable[[Mutant, int], bool]:
    """For what runs at import: all is imported and collected anew in the child."""

    def child(mutant: Mutant, _: int) -> bool:
        import pytest

        for name, module in list(sys.modules.items()):
            source = getattr(module, "__file__", None) or ""
            if name.partition(".")[0] == "finalbench" or source.startswith(str(HARNESS)):
                del sys.modules[name]
        sys.meta_path.insert(0, Stand(mutant))
        return int(pytest.main(arguments(part))) == 0

    return child


class InSession:
    """Collects a part's tests once and runs them in forks with functions' code replaced.

    Tests that noticed most come first, those of the same file before others.
    """

    def __init__(self, chosen: list[Mutant], jobs: int) -> None:
        self.chosen, self.jobs = chosen, jobs
        self.results: list[tuple[Mutant, bool]] = []
        self.broken = False
        self._kills: dict[Path, Counter[int]] = {}
        self._all: Counter[int] = Counter()
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.unfreeze()  # what the suite's conftest froze is not listed
        for thing in gc.get_objects():
            if isinstance(thing, FunctionType):
                code = thing.__code__
                key = (code.co_filename, code.co_qualname, code.co_firstlineno)
                self._functions.setdefault(key, []).append(thing)
        gc.freeze()
        items = session.items
        control = Mutant(ROOT, -1, 0, "nothing", "")
        begun = time.monotonic()
        for _, survived, _ in Forks(1, TIMEOUT_S).run([control], self._child(items)):
            self.broken = not survived
        if self.broken:
            return True
        missing = [m.key for m in self.chosen if self._targets(m) is None]
        if missing:
            raise SystemExit(f"no function to change: {missing}")
        forks = Forks(self.jobs, 15.0 + 10.0 * (time.monotonic() - begun))
        for mutant, survived, said in forks.run(self.chosen, self._child(items)):
            self.results.append((mutant, survived))
            if said:
                self._kills.setdefault(mutant.path, Counter())[int(said)] += 1
                self._all[int(said)] += 1
        return True

    def _targets(self, mutant: Mutant) -> list[tuple[FunctionType, CodeType]] | None:
        found = []
        for (name, line), code in (patch_of(mutant) or {}).items():
            functions = self._functions.get((str(mutant.path), name, line))
            if functions is None:
                return None
            found += [(function, code) for function in functions]
        return found

    def _child(self, items: list[pytest.Item]) -> Callable[[Mutant, int], bool]:
        from _pytest.runner import runtestprotocol

        def child(mutant: Mutant, pipe: int) -> bool:
            for function, code in (self._targets(mutant) or []) if mutant.number >= 0 else []:
                function.__code__ = code
            near = self._kills.get(mutant.path, Counter())
            order = sorted(range(len(items)), key=lambda i: (-near[i], -self._all[i], i))
            for at, index in enumerate(order):
                after = items[order[at + 1]] if at + 1 < len(order) else None
                reports = runtestprotocol(items[index], log=False, nextitem=after)
                if any(report.failed for report in reports):
                    os.write(pipe, str(index).encode())
                    return False
            return True

        return child


def run_all(chosen: dict[str, list[Mutant]], jobs: int) -> Iterator[tuple[str, Mutant, bool]]:
    """Yields (part, mutant, survived). SystemExit when a part's tests fail without a change."""
    early = {part: [m for m in found if patch_of(m) is None] for part, found in chosen.items()}
    for part, found in early.items():
        control = Mutant(ROOT / "finalbench" / part / "__init__.py", -1, 0, "nothing", "")
        for mutant, survived, _ in Forks(jobs, TIMEOUT_S).run(
            [control, *found], run_from_import(part)
        ):
            if mutant is not control:
                yield part, mutant, survived
            elif not survived:
                raise SystemExit(f"{part}: its tests fail without any change")
    for part, found in chosen.items():
        late = [m for m in found if m not in early[part]]
        if late:
            import pytest

            session = InSession(late, jobs)
            pytest.main(arguments(part), plugins=[session])
            if session.broken or len(session.results) != len(late):
                raise SystemExit(f"{part}: its tests fail without any change")
            alive = [mutant for mutant, survived in session.results if survived]
            yield from ((part, m, False) for m, survived in session.results if not survived)
            # A function that is only called at import has done its work before it was changed.
            for mutant, survived, _ in Forks(jobs, TIMEOUT_S).run(alive, run_from_import(part)):
                yield part, mutant, survived


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--sample", type=int, help="at most this many mutants of each part")
    options.add_argument("--module", help="only files whose path contains this")
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--again", type=Path, help="only the survivors that this output names")
    options.add_argument("--list", action="store_true", help="only list the mutants")
    asked = options.parse_args()
    known = set(EQUIVALENT.read_text().splitlines()) if EQUIVALENT.exists() else set()
    chosen: dict[str, list[Mutant]] = {}
    for part in TESTS:
        found = [m for p in sorted((ROOT / "finalbench" / part).glob("*.py")) for m in mutants(p)]
        if asked.module:
            found = [m for m in found if asked.module in str(m.path)]
        if asked.again:
            text = asked.again.read_text()
            found = [m for m in found if f": {m.key}\n" in text]
        if asked.sample and len(found) > asked.sample:
            found = random.Random(asked.seed).sample(found, asked.sample)
        if found:
            chosen[part] = found
    if asked.list:
        for part, found in chosen.items():
            for mutant in found:
                sys.stdout.write(f"{part}: {mutant.line}: {mutant.key}\n")
        return 0
    sys.path[:0] = [str(ROOT), str(HARNESS)]
    warm()
    counts = {part: [0, 0, 0] for part in chosen}
    unknown = 0
    for part, mutant, survived in run_all(chosen, asked.jobs):
        equivalent = mutant.key in known
        counts[part][0] += 1
        counts[part][1] += survived and equivalent
        counts[part][2] += survived and not equivalent
        if survived and not equivalent:
            unknown += 1
            sys.stdout.write(f"survived: line {mutant.line}: {mutant.key}\n")
            sys.stdout.flush()
    sys.stdout.write(
        "\n| part | mutants | noticed | equivalent | survived |\n|---|---:|---:|---:|---:|\n"
    )
    for part, (total, same, alive) in counts.items():
        sys.stdout.write(f"| {part} | {total} | {total - same - alive} | {same} | {alive} |\n")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
