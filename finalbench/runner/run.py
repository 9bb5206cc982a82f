"""Execute a plan: blocks, servers, cells, into a run folder valid at any moment."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from finalbench.errors import EnvironmentMissing, Interrupted
from finalbench.plan import make_plan
from finalbench.provenance import collect
from finalbench.record import Failure, Run, RunStatus
from finalbench.runner.bare import time_bare_loop
from finalbench.runner.block import BlockRunner
from finalbench.runner.headroom import client_ceilings
from finalbench.runner.interrupts import Interrupts
from finalbench.runner.progress import Progress
from finalbench.runner.prompts import check_lengths
from finalbench.runner.state import Ledger, Opened, find_unfinished, open_run, utc_now
from finalbench.runtime.preflight import check_environment, checkpoint_folder
from finalbench.scenario import Scenario

if TYPE_CHECKING:
    from finalbench.runtime.container import ContainerRuntime


@dataclass(frozen=True, slots=True)
class Options:
    """How to run, as against what to run. `resume`: a run, None for the newest cut one."""

    results: Path
    environment: Mapping[str, str]
    resume: Path | None = None
    fresh: bool = False
    endpoints: Mapping[str, str] = field(default_factory=dict)
    containers: ContainerRuntime | None = None  # None: servers are child processes
    command: tuple[str, ...] = ()
    runtime_note: str | None = None  # told once nothing is left that could be refused


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where the run lies and how it ended."""

    path: Path
    run: Run
    resumed: bool


def execute(scenario: Scenario, options: Options, progress: Progress) -> Outcome:
    """Run what is missing of the scenario's plan.

    Errors: `EnvironmentMissing` (no memory, device, weights, disk), `Interrupted` (the partial run
    is kept), `UsageError` (a run to resume that does not fit).
    """
    plan = make_plan(scenario)
    check_lengths(scenario, plan.cells)
    started = [name for name in scenario.arms if name not in options.endpoints]
    if started:
        check_environment(
            scenario,
            options.environment,
            engine_here=options.containers is None,
            started=started,
        )
        scenario = _with_checkpoint(scenario, options.environment)
        plan = make_plan(scenario)
    device = str(next(iter(plan.servers.values()))["device"])
    environment = dict(options.environment)
    if options.containers is not None:
        environment["FINALBENCH_RUNTIME"] = "container"  # never continued in another runtime
        for name in options.containers.sweep():
            progress.note(f"removed {name}, left by a run that was killed")
        options.containers.prepare(started, progress.phase)
    provenance = collect(environment, device=device)
    resume = options.resume
    if resume is None and not options.fresh:
        resume = find_unfinished(options.results, plan, provenance)
    opened = open_run(
        scenario=scenario,
        plan=plan,
        provenance=provenance,
        results=options.results,
        resume=resume,
        command=options.command,
    )
    interrupts = Interrupts()
    with interrupts.installed():
        return _execute(opened, options, progress, interrupts)


def _with_checkpoint(scenario: Scenario, environment: Mapping[str, str]) -> Scenario:
    """The scenario with the folder of its weights; where they lie is not part of its identity."""
    if scenario.serving.weights != "auto" or scenario.model.source == "bundled":
        return scenario
    folder = checkpoint_folder(scenario, environment)
    model = scenario.model.model_copy(update={"path": str(folder) if folder else None})
    return scenario.model_copy(update={"model": model})


def _execute(
    opened: Opened, options: Options, progress: Progress, interrupts: Interrupts
) -> Outcome:
    # Garbage is collected before each cell's requests. What is loaded by now stays, and need not be
    # looked at every time: that took a tenth of a second.
    gc.collect()
    gc.freeze()
    ledger = Ledger(opened.run.plan, opened)
    runner = BlockRunner(
        opened,
        ledger,
        options.endpoints,
        options.environment,
        interrupts,
        progress,
        options.containers,
    )
    path = opened.writer.path
    total = sum(c.requests for c in opened.run.plan.cells) * len(opened.run.plan.blocks)
    progress.begin(total=total, done=ledger.count())
    if options.runtime_note is not None:
        progress.note(options.runtime_note)
    if opened.resumed:
        progress.note(f"resuming {path.name}: {ledger.count()} of {total} requests are on disk")
    bare = opened.run.bare_loop
    status: RunStatus = "failed"
    try:
        if opened.run.scenario.measure.client_ceiling and not opened.run.client_ceilings:
            progress.phase("ceiling of the client")
            ceilings = client_ceilings(opened.run.plan)
            runner.run_state = runner.run_state.model_copy(update={"client_ceilings": ceilings})
        for block in opened.run.plan.blocks:
            runner.run(block)
            if runner.bare.cell is not None:
                continue  # it took turns with the server
            if bare is None and opened.run.scenario.measure.bare_loop and not options.endpoints:
                progress.phase("bare generate loop of the baseline")
                bare = time_bare_loop(opened.run, options.environment, path, options.containers)
                bare = bare.model_copy(update={"after_block": block.index})
                runner.run_state = runner.run_state.model_copy(update={"bare_loop": bare})
        interrupts.check()
        status = "complete" if ledger.count() == total and not runner.unscored() else "partial"
    except KeyboardInterrupt:
        interrupts.ignore_from_now()
        status = "cancelled"
        raise Interrupted(
            f"stopped; the partial run is kept in {path}",
            hint="run the same command again to resume it",
        ) from None
    except EnvironmentMissing as error:
        if error.hint is None:
            error.hint = f"the run so far is kept in {path}"
        raise
    finally:
        interrupts.ignore_from_now()
        runner.stop_servers()
        if options.containers is not None:
            options.containers.close(opened.run.run_id)
        try:
            run = _closed(runner.run_state, status, ledger)
            opened.writer.write_run(run)
        finally:
            opened.writer.close()
    return Outcome(path=path, run=run, resumed=opened.resumed)


def _closed(run: Run, status: RunStatus, ledger: Ledger) -> Run:
    """The run as its last words: the roll ended, and only what still has no result has failed."""
    roll = run.rolls[-1]
    failed = sum(1 for failure in run.failures if failure.roll == roll.index)
    last = roll.model_copy(update={"ended_utc": utc_now(), "status": status, "failed": failed})
    open_failures = tuple(f for f in run.failures if _still_open(f, run, ledger))
    return run.model_copy(
        update={"status": status, "rolls": (*run.rolls[:-1], last), "failures": open_failures}
    )


def _still_open(failure: Failure, run: Run, ledger: Ledger) -> bool:
    if failure.block is None:
        return True
    if failure.cell_id is None:
        return bool(ledger.unscored(failure.block))
    return bool(ledger.missing(run.plan.cell(failure.cell_id), failure.block))
