"""`plan --detect`: how many blocks, from a spread that is stated, assumed or measured."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import stdev

import pytest
import report_runs as runs

from finalbench.aggregate import analyse, sample_size
from finalbench.errors import UsageError
from finalbench.stats import detectable_effect, planned_blocks


def test_a_stated_spread_gives_the_planned_size() -> None:
    found = sample_size(0.03, 3, cv=0.02)
    assert found.blocks == planned_blocks(0.03, 0.02)
    assert found.sd_log == pytest.approx(0.02 * math.sqrt(2))
    assert found.given_detectable == detectable_effect(0.02 * math.sqrt(2), 3)
    assert found.given_detectable > 0.03 and found.blocks > 3
    assert "stated" in found.source


def test_without_a_spread_one_percent_is_assumed_and_said() -> None:
    found = sample_size(0.03, 1)
    assert found.blocks == planned_blocks(0.03, 0.01)
    assert "assumed" in found.source
    assert found.given_detectable is None  # one block shows nothing


def test_a_run_gives_its_own_spread(tmp_path: Path) -> None:
    path = runs.make_run(tmp_path, runs.scenario("measure.blocks=4", "workload.requests=2"))
    analysis = analyse(path)
    row = next(r for r in analysis.rows if r.cell.arm == "vk" and r.cell.axis == "base")
    assert row.comparison is not None
    logs = [math.log(p.candidate / p.baseline) for p in row.comparison.pairs]
    found = sample_size(0.03, 4, measured=path)
    assert found.sd_log == pytest.approx(stdev(logs), rel=1e-12)
    assert found.source.startswith("4 blocks of vk against stock")


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    path = runs.make_run(tmp_path, runs.scenario("measure.blocks=2", "workload.requests=2"))
    with pytest.raises(UsageError, match="2 pairs of blocks; three are needed"):
        sample_size(0.03, 2, measured=path)
    with pytest.raises(UsageError, match="not both"):
        sample_size(0.03, 2, cv=0.01, measured=path)
    with pytest.raises(UsageError, match="more than 10000 blocks"):
        sample_size(0.0001, 2, cv=0.5)
