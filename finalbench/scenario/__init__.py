"""What is measured: a frozen, validated description, and how it is read from YAML."""

from __future__ import annotations

from finalbench.scenario.base import Frozen, digest
from finalbench.scenario.models import (
    DTYPE_BYTES,
    Axes,
    CacheState,
    DraftSetting,
    Estimate,
    Hardware,
    Measure,
    ModelFacts,
    ModelSpec,
    Point,
    Sampling,
    Scenario,
    Serving,
    cached_share,
)
from finalbench.scenario.source import (
    Override,
    find_scenario,
    load_scenario,
    parse_override,
    scenario_files,
)
from finalbench.scenario.workload import Limits, Workload

__all__ = [
    "DTYPE_BYTES",
    "Axes",
    "CacheState",
    "DraftSetting",
    "Estimate",
    "Frozen",
    "Hardware",
    "Limits",
    "Measure",
    "ModelFacts",
    "ModelSpec",
    "Override",
    "Point",
    "Sampling",
    "Scenario",
    "Serving",
    "Workload",
    "cached_share",
    "digest",
    "find_scenario",
    "load_scenario",
    "parse_override",
    "scenario_files",
]
