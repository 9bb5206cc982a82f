"""`report`, `scenarios`, `doctor` and `clean`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finalbench.cli.options import (
    DEFAULT_RESULTS,
    JsonOption,
    ResultsOption,
    SetOption,
    complete_scenario,
    environment,
    print_json,
)

scenarios_app = typer.Typer(no_args_is_help=True, help="List, show and check scenarios.")


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command()(report)
    app.add_typer(scenarios_app, name="scenarios")
    app.command()(doctor)
    app.command()(clean)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("reports"),
    claims: Annotated[
        Path | None, typer.Option(help="A claims ledger to show beside what was measured.")
    ] = None,
    space: Annotated[
        bool, typer.Option("--space", help="Also write what makes the folder a static Space.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Render leaderboard.md, report.html and card.md from runs. Needs no server and no network."""
    from finalbench.report import render

    files = [str(path) for path in render(runs, out, claims=claims, space=space)]
    if as_json:
        print_json({"schema_version": 1, "files": files})
    else:
        typer.echo("\n".join(files))


@scenarios_app.command("list")
def scenarios_list(as_json: JsonOption = False) -> None:
    """The shipped scenarios."""
    from finalbench.scenario import load_scenario, scenario_files

    rows = [load_scenario(name) for name in scenario_files()]
    if as_json:
        print_json(
            {
                "schema_version": 1,
                "scenarios": [
                    {
                        "name": row.name,
                        "title": row.title,
                        "device": row.hardware.device,
                        "devices": row.hardware.devices,
                        "memory_gb": row.hardware.memory_gb,
                    }
                    for row in rows
                ],
            }
        )
        return
    for row in rows:
        need = f"{row.hardware.devices} {row.hardware.device}, {row.hardware.memory_gb:g} GB"
        typer.echo(f"{row.name:<18} {need:<18} {row.title}")


@scenarios_app.command("show")
def scenarios_show(
    name: Annotated[str, typer.Argument(autocompletion=complete_scenario)],
    as_json: JsonOption = False,
) -> None:
    """One scenario: its YAML, or resolved as JSON."""
    from finalbench.scenario import find_scenario, load_scenario

    if as_json:
        scenario = load_scenario(name).model_dump(mode="json")
        print_json({"schema_version": 1, "scenario": scenario})
    else:
        typer.echo(find_scenario(name).read_text(encoding="utf-8").rstrip("\n"))


@scenarios_app.command("check")
def scenarios_check(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names or files; all when none.")
    ] = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Validate scenarios and count their cells; the first fault ends with exit 2."""
    from finalbench.errors import UsageError
    from finalbench.plan import make_plan, unequal_settings
    from finalbench.scenario import load_scenario, parse_override, scenario_files

    overrides = [parse_override(text) for text in sets or []]
    checked: dict[str, int] = {}
    for name in names or scenario_files():
        plan = make_plan(load_scenario(name, overrides))
        for fault in unequal_settings(plan):
            raise UsageError(f"{name}: {fault}")
        checked[name] = len(plan.cells)
    if as_json:
        print_json({"schema_version": 1, "cells": checked})
        return
    for name, cells in checked.items():
        typer.echo(f"{name}: ok, {cells} cells")


def doctor(
    as_json: JsonOption = False,
    results_dir: ResultsOption = DEFAULT_RESULTS,
    streams: Annotated[
        list[int] | None,
        typer.Option(help="Streams the client is timed at; default 1, 64 and 1024."),
    ] = None,
    toy: Annotated[
        str | None,
        typer.Option(
            metavar="BEHAVIOUR", help="Serve the toy server instead: `ok`, or a fault by name."
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The toy's port; 0 takes a free one.")
    ] = 0,
    offline: Annotated[
        bool, typer.Option("--offline", help="Also: is everything here that no network can bring?")
    ] = False,
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="With --offline: these scenarios.")
    ] = None,
) -> None:
    """Check this machine: engine, GPU, containers, disk, ports, the client's own speed.

    With --offline, also weights and images; a scenario named by --model must have its weights here.

    With --toy, serve a toy OpenAI server that misbehaves as told (`cut_stream`, or
    `ok,step_ms=20,usage=absent`) until interrupted, to see what a client makes of it.
    """
    if toy is not None:
        from finalbench.testing.toy import main as serve_toy

        raise typer.Exit(serve_toy(["--behaviour", toy, "--port", str(port)]))
    from finalbench.cli.doctor import CLIENT_STREAMS, check_machine

    checks = check_machine(environment(), results_dir, streams=tuple(streams or CLIENT_STREAMS))
    if offline:
        from finalbench.cli.offline import check_offline

        checks += check_offline(environment(), model or [])
    if as_json:
        print_json({"schema_version": 1, "checks": [check.as_dict() for check in checks]})
    else:
        for check in checks:
            typer.echo(f"{check.status:<5} {check.name:<14} {check.text}")
    if any(check.status == "FAIL" for check in checks):
        raise typer.Exit(3)


def clean(
    results_dir: ResultsOption = DEFAULT_RESULTS,
    runs: Annotated[
        bool, typer.Option("--runs", help="Also delete unfinished runs (cancelled, failed).")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """End servers that a killed run left behind; with --runs, delete unfinished runs."""
    from finalbench.cli.sweep import sweep

    done = sweep(results_dir, environment(), runs=runs, dry_run=dry_run)
    if as_json:
        print_json({"schema_version": 1, "dry_run": dry_run, **done})
        return
    verb = "would end" if dry_run else "ended"
    typer.echo(f"{verb} {len(done['processes']) + len(done['containers'])} server(s)")
    for path in done["runs"]:
        typer.echo(f"{'would delete' if dry_run else 'deleted'} {path}")
