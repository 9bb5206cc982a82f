"""Whether two runs may be compared at all, and what else changed between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from finalbench.aggregate import Analysis
from finalbench.gate.rows import Change
from finalbench.provenance import Provenance

# Differ from run to run, or are reported as changes of code rather than refused as settings.
FREE_SETTINGS = frozenset(
    {
        "nonce",
        "pid",
        "host_launch_us",
        "versions",
        "schema_version",
        "kernel_fallbacks",
        "model",
        "routing",  # a measurement, judged in each run by itself
    }
)
OWN_PACKAGES = ("finalbench", "vkengine")


def refusals(baseline: Analysis, candidate: Analysis) -> list[str]:
    """Every difference that forbids the comparison, by name."""
    found: list[str] = []
    pairs: list[tuple[str, Any, Any]] = [
        ("scenario", baseline.scenario_hash[:12], candidate.scenario_hash[:12]),
        ("hardware", _hardware(baseline), _hardware(candidate)),
        ("weights", baseline.weights, candidate.weights),
    ]
    for arm in baseline.settings.keys() & candidate.settings.keys():
        old, new = baseline.settings[arm], candidate.settings[arm]
        for name in sorted((old.keys() | new.keys()) - FREE_SETTINGS):
            shown = (
                "weights (model digest)" if name == "model_digest" else f"settings of {arm}: {name}"
            )
            pairs.append((shown, old.get(name), new.get(name)))
    for name, old, new in pairs:
        if old != new:
            found.append(f"{name} differs: {old} against {new}")
    for arm in baseline.settings.keys() ^ candidate.settings.keys():
        found.append(f"arm {arm} is in one run only")
    for which, analysis in (("baseline", baseline), ("candidate", candidate)):
        if analysis.status not in ("complete", "partial"):
            found.append(f"the {which} run is {analysis.status}")
    return found


def changes(baseline: Analysis, candidate: Analysis) -> list[Change]:
    """Differences of circumstance; more than one kind of them confounds a verdict's cause."""
    return list(_changes(baseline.provenance, candidate.provenance))


def is_confounded(found: list[Change]) -> bool:
    """Two kinds of change at once: whichever moved the number cannot be told."""
    return len({c.factor for c in found if c.factor != "host"}) > 1


def _changes(old: Provenance, new: Provenance) -> Iterator[Change]:
    if old.git_commit != new.git_commit:
        yield _change("code", "commit", old.git_commit, new.git_commit)
    for name in sorted(old.packages.keys() | new.packages.keys()):
        before, after = old.packages.get(name), new.packages.get(name)
        if before != after:
            yield _change("code" if name in OWN_PACKAGES else "packages", name, before, after)
    drivers = [[gpu.driver for gpu in p.hardware.gpus] for p in (old, new)]
    if drivers[0] != drivers[1]:
        yield _change("driver", "GPU driver", drivers[0], drivers[1])
    for name in ("os", "python"):
        if getattr(old, name) != getattr(new, name):
            yield _change("system", name, getattr(old, name), getattr(new, name))
    if old.hardware.governor != new.hardware.governor:
        yield _change("system", "governor", old.hardware.governor, new.hardware.governor)
    for name in sorted(old.environment.keys() | new.environment.keys()):
        if old.environment.get(name) != new.environment.get(name):
            yield _change("system", name, old.environment.get(name), new.environment.get(name))
    if old.host != new.host:
        yield _change("host", "host", old.host, new.host)


def _change(factor: Any, name: str, old: object, new: object) -> Change:
    return Change(factor=factor, name=name, baseline=str(old), candidate=str(new))


def _hardware(analysis: Analysis) -> str:
    hardware = analysis.provenance.hardware
    gpus = ", ".join(gpu.name for gpu in hardware.gpus)
    return f"{hardware.cpu}, {hardware.cores} cores" + (f", {gpus}" if gpus else "")
