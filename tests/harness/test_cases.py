"""Every known fault of other harnesses has a test that names it: by function, docstring or id."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
# By letter: tokens, workload, cache and warm-up, load, failures, drafts, gates, power, records.
CASES = {
    "T": "01 02 04 05 06 08 09 10 12 13 14 16 17 18 19 20 22 23 24",
    "W": "01 03 04 05 07 08 10",
    "C": "01 03 04 05 07 08 09 11 12",
    "L": "01 03 04 05 06 08 09 10 11 12 14 15 17 18",
    "F": "01 02 04 05 07 08 09 10",
    "S": "01 02 04 05 07 08",
    "G": "01 02 04 05 06 07 09 10 11 13 14 15 16",
    "P": "01 03 04",
    "R": "01 03 05 06 07",
}
IDS = {letter + number for letter, numbers in CASES.items() for number in numbers.split()}


def named(tree: ast.Module) -> Iterator[str]:
    """Ids in names and docstrings of test functions, and at the start of ids of their rows.

    A module all of whose tests are about one case says so in the first words of its docstring.
    """
    whole = re.match(r"Case ([A-Z]\d\d)\b", ast.get_docstring(tree) or "")
    if whole:
        yield whole[1]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield from (part.upper() for part in node.name.split("_"))
            yield from re.findall(r"\b[A-Z]\d\d\b", ast.get_docstring(node) or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = re.match(r"([A-Z]\d\d)[- ]\S", node.value)
            if found:
                yield found[1]


def test_every_case_is_a_test_that_names_it() -> None:
    found = {
        name
        for path in TESTS.rglob("test_*.py")
        if path != Path(__file__)
        for name in named(ast.parse(path.read_text()))
    }
    assert len(IDS) == 84
    assert IDS - found == set()
