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
    # Arms that hold the same weights route alike: one of them may speak for the others.
    told = {_weights(s): found for s in servers if (found := _distinct(s))}
    for server in servers:
        if server.purpose != "measure":
            continue
        measured = _distinct(server) or told.get(_weights(server), [])
        if not measured:
            yield violation(
                "correlated_routing",
                f"{server.server_id}: distinct experts were not measured",
                block=server.block,
            )
        for rows, found in enumerate(measured, 1):
            expected = expected_distinct(facts.experts, facts.experts_per_token, rows)
            if abs(found - expected) > TOLERANCE * expected:
                yield violation(
                    "correlated_routing",
                    f"{server.server_id}: {rows} rows meet {found:.1f} distinct experts a layer, "
                    f"independent routing {expected:.1f}",
                    block=server.block,
                    rows=rows,
                    found=found,
                    expected=expected,
                )


def _distinct(server: ServerRecord) -> list[float]:
    """As last told: a server may measure it while it serves."""
    for settings in (server.settings_after, server.settings):
        told = (settings or {}).get(ROUTING) or {}
        if told.get(DISTINCT):
            return [float(value) for value in told[DISTINCT]]
    return []


def _weights(server: ServerRecord) -> tuple[object, object]:
    settings = server.settings or {}
    return settings.get("weights"), settings.get("model_digest")


def expected_distinct(experts: int, per_token: int, rows: int) -> float:
    """Mean number of distinct experts when `rows` rows each draw `per_token` independently."""
    return experts * (1 - (1 - per_token / experts) ** rows)
