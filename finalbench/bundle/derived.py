"""metrics.json: all that is derived from a run's records, and whether it still fits them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from finalbench.equality import EqualityRow, judge
from finalbench.errors import BundleBroken
from finalbench.metrics import MetricsTable, compute
from finalbench.record import RunRecords, load_run, write_atomic
from finalbench.scenario import Frozen
from finalbench.validity import Violation, check

METRICS_FILE = "metrics.json"
TOLERANCE = 1e-9


class Derived(Frozen):
    """Rates, equality and breaches of one run; never edited, always recomputable."""

    schema_version: Literal[1] = 1
    metrics: MetricsTable
    equality: tuple[EqualityRow, ...]
    violations: tuple[Violation, ...]

    def document(self) -> dict[str, Any]:
        """The content of metrics.json."""
        table = self.metrics.model_dump(mode="json")
        return {
            "schema_version": self.schema_version,
            "run_id": table["run_id"],
            "memory": table["memory"],
            "cells": table["cells"],
            "equality": [row.model_dump(mode="json") for row in self.equality],
            "violations": [row.model_dump(mode="json") for row in self.violations],
        }


def derive(records: RunRecords) -> Derived:
    metrics = compute(records)
    return Derived(
        metrics=metrics,
        equality=tuple(judge(records)),
        violations=tuple(check(records, metrics)),
    )


def write_metrics(run_dir: Path) -> Derived:
    """Derive from the records on disk and replace metrics.json."""
    derived = derive(load_run(run_dir))
    text = json.dumps(derived.document(), indent=1, allow_nan=False)
    write_atomic(run_dir / METRICS_FILE, text.encode() + b"\n")
    return derived


def load_checked(run_dir: Path) -> tuple[RunRecords, Derived]:
    """Records and what they give. BundleBroken names the first field metrics.json has wrong."""
    records = load_run(run_dir)
    derived = derive(records)
    if (run_dir / METRICS_FILE).is_file():
        for difference in metrics_differences(run_dir, derived):
            raise BundleBroken(f"{run_dir / METRICS_FILE}: {difference}")
    return records, derived


def metrics_differences(run_dir: Path, derived: Derived) -> Iterator[str]:
    """What the stored metrics.json says otherwise than the records, field by field."""
    try:
        stored = json.loads((run_dir / METRICS_FILE).read_bytes())
    except (ValueError, UnicodeDecodeError) as error:
        yield f"not readable: {error}"
        return
    yield from differences(stored, derived.document())


def differences(stored: Any, derived: Any, path: str = "") -> Iterator[str]:
    """Leaves that differ, as `cells[2].decode_tok_s is 601, the records give 25.7`."""
    if isinstance(stored, dict) and isinstance(derived, dict):
        for key in sorted(stored.keys() | derived.keys()):
            where = f"{path}.{key}" if path else str(key)
            if key not in stored:
                yield f"{where} is missing"
            elif key not in derived:
                yield f"{where} is not a field"
            else:
                yield from differences(stored[key], derived[key], where)
    elif isinstance(stored, list) and isinstance(derived, list):
        if len(stored) != len(derived):
            yield f"{path} has {len(stored)} entries, the records give {len(derived)}"
        for index, (left, right) in enumerate(zip(stored, derived, strict=False)):
            yield from differences(left, right, f"{path}[{index}]")
    elif not _same(stored, derived):
        yield f"{path} is {stored!r}, the records give {derived!r}"


def _same(stored: Any, derived: Any) -> bool:
    numbers = (int, float)
    if isinstance(stored, bool) or isinstance(derived, bool):
        return stored is derived
    if isinstance(stored, numbers) and isinstance(derived, numbers):
        # Another processor's library may round the last place of a quantile differently.
        return math.isclose(stored, derived, rel_tol=TOLERANCE, abs_tol=1e-15)
    return type(stored) is type(derived) and stored == derived
