"""`plan` and `run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from finalbench.cli.options import (
    DEFAULT_RESULTS,
    ArmsOption,
    BlocksOption,
    CheckpointOption,
    GridOption,
    JsonOption,
    ModelOption,
    ResultsOption,
    ScenarioArgument,
    SetOption,
    ThreadsOption,
    WeightsOption,
    environment,
    overrides_of,
    print_json,
    resolve,
    share,
)


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command()(plan)
    app.command()(run)


def plan(
    scenario: ScenarioArgument = None,
    model: ModelOption = None,
    sets: SetOption = None,
    weights: WeightsOption = None,
    blocks: BlocksOption = None,
    arms: ArmsOption = None,
    grid: GridOption = None,
    threads: ThreadsOption = None,
    checkpoint: CheckpointOption = None,
    detect: Annotated[
        str | None,
        typer.Option(metavar="EFFECT", help="How many blocks show a change of, say, 3%."),
    ] = None,
    cv: Annotated[
        str | None,
        typer.Option("--cv", help="With --detect: spread of one arm's runs, 1% if not given."),
    ] = None,
    spread_of: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="With --detect: take the spread from this run's blocks."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what `run` would do: cells, servers, order, time. Works on any machine."""
    from finalbench.errors import UsageError
    from finalbench.plan import make_plan

    resolved = resolve(
        scenario,
        model,
        overrides_of(
            sets=sets,
            weights=weights,
            blocks=blocks,
            arms=arms,
            grid=grid,
            threads=threads,
            checkpoint=checkpoint,
        ),
    )
    made = make_plan(resolved)
    size = None
    if detect is not None:
        from finalbench.aggregate import sample_size

        spread = None if cv is None else share("--cv", cv)
        effect = share("--detect", detect)
        size = sample_size(effect, resolved.measure.blocks, cv=spread, measured=spread_of)
    elif cv is not None or spread_of is not None:
        raise UsageError("--cv and --spread-of belong to --detect")
    if as_json:
        document = {
            "schema_version": 1,
            "scenario": resolved.model_dump(mode="json"),
            "plan": made.model_dump(mode="json"),
        }
        if size is not None:
            document["sample_size"] = size.model_dump(mode="json")
        print_json(document)
    else:
        from finalbench.cli.tables import show_plan

        show_plan(resolved, made, size)


def run(
    scenario: ScenarioArgument = None,
    model: ModelOption = None,
    sets: SetOption = None,
    weights: WeightsOption = None,
    blocks: BlocksOption = None,
    arms: ArmsOption = None,
    grid: GridOption = None,
    threads: ThreadsOption = None,
    checkpoint: CheckpointOption = None,
    runtime: Annotated[
        str, typer.Option(help="`container`, `process`, `endpoint` (with --endpoint), or `auto`.")
    ] = "auto",
    pinned: Annotated[
        bool, typer.Option("--pinned", help="Containers only from images with a known digest.")
    ] = False,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(metavar="ARM=URL", help="Use a server that already runs; repeat per arm."),
    ] = None,
    results_dir: ResultsOption = DEFAULT_RESULTS,
    resume: Annotated[
        Path | None, typer.Option(help="Continue this run, also one with failed cells.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start a new run even if an unfinished one fits.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="The same.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a scenario: fresh servers in alternating order, records, table, report.

    An unfinished run of the same plan, on the same machine and commit, is continued; --fresh starts
    anew. A run that ended with failed cells is continued only when named by --resume.
    """
    from finalbench.cli.containers import choose_runtime
    from finalbench.cli.finish import exit_code_of, finish
    from finalbench.cli.live import shown
    from finalbench.hub.redact import scrub_command, secret_values
    from finalbench.runner import Options, execute

    resolved = resolve(
        scenario,
        model,
        overrides_of(
            sets=sets,
            weights=weights,
            blocks=blocks,
            arms=arms,
            grid=grid,
            threads=threads,
            checkpoint=checkpoint,
        ),
    )
    endpoints = _endpoints(runtime, endpoint or [], resolved.arms)
    containers, why = choose_runtime(runtime, resolved, endpoints, environment(), pinned=pinned)
    options = Options(
        results=results_dir,
        environment=environment(),
        resume=_run_folder(resume, results_dir),
        fresh=fresh,
        endpoints=endpoints,
        containers=containers,
        runtime_note=f"runtime: {why}" if runtime == "auto" and not quiet else None,
        command=tuple(scrub_command(["finalbench", *sys.argv[1:]], secret_values(environment()))),
    )
    with shown(quiet=quiet, bar=not no_progress) as progress:
        outcome = execute(resolved, options, progress)
        progress.phase("metrics and report")
        finished = finish(outcome.path)
    if as_json:
        print_json(finished.summary)
    else:
        from finalbench.cli.tables import show_run

        show_run(finished)
    raise typer.Exit(exit_code_of(finished.summary))


def _endpoints(runtime: str, given: list[str], arms: tuple[str, ...]) -> dict[str, str]:
    from finalbench.cli.containers import RUNTIMES
    from finalbench.errors import UsageError

    if runtime not in RUNTIMES:
        raise UsageError(f"--runtime {runtime}: must be one of {', '.join(RUNTIMES)}")
    endpoints: dict[str, str] = {}
    for text in given:
        name, separator, url = text.partition("=")
        if not separator or not url.startswith(("http://", "https://")):
            raise UsageError(f"--endpoint {text}: write it as ARM=http://host:port")
        if name not in arms:
            raise UsageError(f"--endpoint {text}: {name!r} is not among arms {', '.join(arms)}")
        endpoints[name] = url.rstrip("/")
    if runtime == "process" and endpoints:
        raise UsageError("--endpoint needs --runtime endpoint or auto")
    if runtime == "endpoint" and set(endpoints) != set(arms):
        missing = ", ".join(a for a in arms if a not in endpoints)
        raise UsageError(f"--runtime endpoint: no --endpoint for {missing}")
    return endpoints


def _run_folder(resume: Path | None, results: Path) -> Path | None:
    """A run by its folder, or by its name under the results folder."""
    from finalbench.errors import UsageError

    if resume is None:
        return None
    for candidate in (resume, results / resume):
        if (candidate / "run.json").is_file():
            return candidate
    raise UsageError(f"--resume {resume}: no run there")
