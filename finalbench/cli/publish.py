"""`verify`, `compare`, `gate`, `claim`, `upload`, `pull`: thin, they call one function each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finalbench.cli.options import JsonOption, print_json


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command()(verify)


def verify(
    runs: Annotated[list[Path], typer.Argument(help="Sealed run folders.")],
    as_json: JsonOption = False,
) -> None:
    """Hash every file of a sealed run and derive every number again from the raw records."""
    from finalbench.bundle import verify as verify_bundle

    results = [(run, verify_bundle(run)) for run in runs]
    if as_json:
        print_json(
            {
                "schema_version": 1,
                "runs": [
                    {"run": str(run)} | result.model_dump(mode="json") for run, result in results
                ],
            }
        )
    else:
        for run, result in results:
            typer.echo(f"{run}: {'ok' if result.ok else 'BROKEN'}")
            for problem in result.problems:
                typer.echo(f"  {problem.file}: {problem.message}")
    if not all(result.ok for _, result in results):
        raise typer.Exit(5)
