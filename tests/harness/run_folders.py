"""Run folders for tests."""

from __future__ import annotations

import os
from pathlib import Path

from finalbench.plan import make_plan
from finalbench.provenance import collect
from finalbench.record import Classes, Roll, Run, RunWriter
from finalbench.scenario import load_scenario


def minimal_run(path: Path) -> Path:
    """A run that has just begun: no record yet."""
    scenario = load_scenario("vk-tiny")
    run = Run(
        run_id=path.name,
        status="running",
        scenario=scenario,
        plan=make_plan(scenario),
        provenance=collect(dict(os.environ), device="cpu"),
        rolls=(
            Roll(
                index=0,
                started_utc="2026-01-01T00:00:00Z",
                ended_utc=None,
                status="running",
                command=(),
            ),
        ),
        failures=(),
        bare_loop=None,
        classes=Classes(weights="real", acceptance="measured"),
    )
    writer = RunWriter(path)
    writer.write_run(run)
    writer.close()
    return path
