"""Random weights of a mixture-of-experts shape: is routing as good as independent?

Collapsed routing reads fewer experts a verify step than a real model would, which flatters drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from finalbench.record import Run, ServerRecord
from finalbench.validity.violation import Violation, violation

TOLERANCE = 0.03
ROUTING = "routing"
DISTINCT = "distinct_experts"  # mean over layers, for 1, 2, 3... rows of one step


def check_routing(run: Run, servers: Sequence[ServerRecord]) -> Iterator[Violation]:
    facts = run.scenario.model.facts
    if run.classes.weights != "random" or facts.experts == 0:
        return
    for arm in dict.fromkeys(s.arm for s in servers if s.purpose == "measure"):
        settings = [s.settings or {} for s in servers if s.arm == arm and s.purpose == "measure"]
        measured = (settings[0].get(ROUTING) or {}).get(DISTINCT)
        if not measured:
            yield violation("correlated_routing", f"{arm}: distinct experts were not measured")
            continue
        for rows, found in enumerate(measured, 1):
            expected = expected_distinct(facts.experts, facts.experts_per_token, rows)
            if abs(found - expected) > TOLERANCE * expected:
                yield violation(
                    "correlated_routing",
                    f"{arm}: {rows} rows meet {found:.1f} distinct experts a layer, independent "
                    f"routing {expected:.1f}",
                    rows=rows,
                    found=found,
                    expected=expected,
                )


def expected_distinct(experts: int, per_token: int, rows: int) -> float:
    """Mean number of distinct experts when `rows` rows each draw `per_token` independently."""
    return experts * (1 - (1 - per_token / experts) ** rows)
