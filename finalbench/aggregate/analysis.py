"""A run folder or its records -> everything that is known about the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finalbench.aggregate.bare import compare_bare
from finalbench.aggregate.compare import compare, with_holm
from finalbench.aggregate.costs import draft_costs
from finalbench.aggregate.energy import energy_table
from finalbench.aggregate.headline import domain_split, headline
from finalbench.aggregate.rows import (
    AaRow,
    Analysis,
    Comparison,
    Marks,
    ResultRow,
)
from finalbench.aggregate.spread import axis_spread, variance_table
from finalbench.arms import ARMS
from finalbench.bundle import derive, load_checked
from finalbench.equality import EqualityRow, class_of
from finalbench.metrics import CellRow
from finalbench.record import Run, RunRecords
from finalbench.scenario import Scenario
from finalbench.validity import Violation


def analyse(run_dir: Path | RunRecords) -> Analysis:
    """Judge one run from its raw records.

    A metrics.json in the folder is compared with what the records give; BundleBroken names the
    first field that differs.
    """
    if isinstance(run_dir, RunRecords):
        records, derived = run_dir, derive(run_dir)
    else:
        records, derived = load_checked(run_dir)
    run = records.run
    violations = derived.violations
    baselines = baseline_arms(run.scenario)
    compared = _comparisons(derived.metrics.cells, baselines, violations)
    rows = tuple(
        _row(cell, run, baselines, compared.get(cell.id, ()), derived.equality, violations)
        for cell in derived.metrics.cells
    )
    arms = tuple(dict.fromkeys(c.arm for c in derived.metrics.cells))
    copies = twins(run.scenario)
    return Analysis(
        run_id=run.run_id,
        path=str(records.path),
        status=run.status,
        scenario=run.scenario.name,
        scenario_hash=run.plan.scenario_hash,
        model=model_name(run),
        hardware=hardware_name(records),
        dtype=run.scenario.model.dtype,
        weights=run.classes.weights,
        rows=rows,
        equality=derived.equality,
        violations=violations,
        headline=headline(rows, model=model_name(run), baselines=(*baselines, *copies), run=run),
        spread=tuple(s for arm in arms for s in axis_spread(rows, arm)),
        variance=tuple(variance_table(records, rows, arm) for arm in arms),
        domains=domain_split(rows, (*baselines, *copies)),
        draft_costs=draft_costs(rows),
        energy=energy_table(records),
        aa=_aa(derived.metrics.cells, copies, violations),
        aa_reason=None if copies else "not measured: the scenario has no second copy of an arm",
        bare_loop=compare_bare(run, rows, baselines),
        bare_loop_raw=run.bare_loop,
        rolls=run.rolls,
        failures=run.failures,
        memory=derived.metrics.memory.model_dump(mode="json"),
        provenance=run.provenance,
        settings=_settings(records),
    )


def baseline_arms(scenario: Scenario) -> tuple[str, ...]:
    """The declared baseline and every other stock arm of the scenario, second copies left out."""
    copies = twins(scenario)
    found = [scenario.baseline] if scenario.baseline else []
    found += [a for a in scenario.arms if a in ARMS and ARMS[a].profile.startswith("stock")]
    return tuple(a for a in dict.fromkeys(found) if a not in copies)


def twins(scenario: Scenario) -> dict[str, str]:
    """Arm -> the arm it is a second copy of: both start the same server."""
    first: dict[tuple[str, str], str] = {}
    found: dict[str, str] = {}
    for name in scenario.arms:
        if name in ARMS:
            original = first.setdefault((ARMS[name].engine, ARMS[name].profile), name)
            if original != name:
                found[name] = original
    return found


def model_name(run: Run) -> str:
    """With random weights a row is named by its shape, never as the model."""
    name = run.scenario.model.name
    return f"{name} shape" if run.classes.weights == "random" else name


def hardware_name(records: RunRecords) -> str:
    """The GPU where one was used, else the processor and the threads the servers had."""
    for server in records.servers:
        settings = server.settings or {}
        if str(settings.get("device", "")).startswith("cuda") and settings.get("device_name"):
            return str(settings["device_name"])
    hardware = records.run.provenance.hardware
    threads = {
        str((s.settings or {}).get("threads")) for s in records.servers if s.settings is not None
    }
    if len(threads) != 1 or threads == {"None"}:
        return hardware.cpu
    count = threads.pop()
    return f"{hardware.cpu}, {count} thread{'' if count == '1' else 's'}"


def _settings(records: RunRecords) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for server in records.servers:
        if server.purpose == "measure" and server.settings is not None:
            found.setdefault(server.arm, server.settings)
    return found


def _comparisons(
    cells: Sequence[CellRow], baselines: Sequence[str], violations: Sequence[Violation]
) -> dict[str, tuple[Comparison, ...]]:
    by_arm = {(c.arm, c.pair_key): c for c in reversed(cells)}
    # A baseline that drafts too is met draft for draft, where it has the same setting.
    by_draft = {(c.arm, c.pair_key, c.draft_label): c for c in reversed(cells)}
    found: dict[str, list[Comparison]] = {}
    for arm in baselines:
        # The base cell was declared beforehand and stands alone; the others are a family.
        for base in (True, False):
            family = {
                cell.id: compare(
                    cell,
                    by_draft.get(
                        (arm, cell.pair_key, cell.draft_label), by_arm[arm, cell.pair_key]
                    ),
                    violations,
                )
                for cell in cells
                if cell.arm not in baselines
                and (arm, cell.pair_key) in by_arm
                and (cell.axis == "base") is base
            }
            for cell_id, comparison in with_holm(family).items():
                found.setdefault(cell_id, []).append(comparison)
    return {cell_id: tuple(value) for cell_id, value in found.items()}


def _aa(
    cells: Sequence[CellRow], copies: Mapping[str, str], violations: Sequence[Violation]
) -> tuple[AaRow, ...]:
    """Each cell of a second copy against the same cell of the first."""
    first = {(c.arm, c.pair_key, c.draft_label): c for c in reversed(cells)}
    found = []
    for cell in cells:
        original = copies.get(cell.arm)
        if original is None:
            continue
        key = (original, cell.pair_key, cell.draft_label)
        if key in first:
            found.append(
                AaRow(
                    arm=original,
                    twin=cell.arm,
                    cell_id=cell.id,
                    label=label(cell),
                    comparison=compare(cell, first[key], violations),
                )
            )
    return tuple(found)


def _row(
    cell: CellRow,
    run: Run,
    baselines: Sequence[str],
    comparisons: Sequence[Comparison],
    equality: Sequence[EqualityRow],
    violations: Sequence[Violation],
) -> ResultRow:
    if cell.arm in baselines:
        result, reason = "not_applicable", "this arm is the reference"
    else:
        result, reason = class_of(equality, cell.id)
    synthetic = cell.draft.get("acceptance") is not None or cell.draft.get("method") == "oracle"
    return ResultRow(
        cell=cell,
        label=label(cell),
        marks=Marks(
            weights=run.classes.weights,
            acceptance="synthetic" if synthetic else "measured",
            equality=result,
            equality_reason=reason,
        ),
        comparisons=tuple(comparisons),
        violations=tuple(v for v in violations if v.cell_id in (cell.id, None)),
    )


def label(cell: CellRow) -> str:
    load = "" if cell.concurrency == 1 else f", {cell.concurrency} streams"
    lengths = f"{cell.seq_len} in, {cell.output_len} out"
    cache = f", {cell.cache_label}" if cell.cache_label else ""
    return f"{lengths}, {cell.sampling}, drafts {cell.draft_label}{load}{cache}"
