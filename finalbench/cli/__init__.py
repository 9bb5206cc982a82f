"""The commands: parse, call one function, print. Everything heavy is imported inside a command."""

from __future__ import annotations

from typing import Annotated

import typer

from finalbench.cli import claim, foreign, inspect, measure, publish, share

app = typer.Typer(
    name="finalbench",
    help="Measure how fast an engine serves a model against a stock baseline, and prove it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from finalbench import __version__

        typer.echo(f"finalbench {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before a command."""


measure.register(app)
inspect.register(app)
publish.register(app)
foreign.register(app)
claim.register(app)
share.register(app)
