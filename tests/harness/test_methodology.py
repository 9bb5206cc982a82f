"""docs/methodology.md says what the code does: its lists are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from finalbench.bundle import NOT_PROVEN
from finalbench.equality import TIE_BOUNDS
from finalbench.metrics import FLOORS, METRICS
from finalbench.stats import EQUIVALENCE_MARGIN
from finalbench.validity import RULES

TEXT = (Path(__file__).parents[2] / "docs" / "methodology.md").read_text()


def block(name: str) -> str:
    found = re.search(f"<!-- {name} -->\n(.*?)<!-- /{name} -->", TEXT, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_rules_are_the_codes_rules() -> None:
    rows = ["| rule | severity | what must hold |", "|---|---|---|"]
    rows += [f"| `{r.id}` | {r.severity} | {r.text} |" for r in RULES.values()]
    assert block("rules") == "\n".join(rows) + "\n"


def test_what_a_seal_does_not_prove_is_what_verify_prints() -> None:
    assert block("not-proven") == "".join(f"- {line}\n" for line in NOT_PROVEN)


def test_bounds_and_names_are_the_codes() -> None:
    assert f"margin ({EQUIVALENCE_MARGIN * 100:.0f} %)" in TEXT
    assert "1e-3 in float32, 0.25 in 16-bit types" in TEXT
    assert TIE_BOUNDS == {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.25}
    for floor in FLOORS.values():
        assert f"{floor:,}" in TEXT
    for name in re.findall(r"`([a-z0-9]+(?:_[a-z0-9]+)*_(?:tok_s|s))`", TEXT):
        assert name in METRICS
