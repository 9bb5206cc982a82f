"""`verify`, `sign`, `compare` and `gate`: thin, each calls one function."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finalbench.cli.options import JsonOption, print_json

if TYPE_CHECKING:
    from finalbench.bundle import Problem, Verification
    from finalbench.gate import GateResult

STEP_SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"

BaselineOption = Annotated[Path, typer.Option(help="A run folder, or a file that pins one.")]
MarginOption = Annotated[float | None, typer.Option(help="What counts as equal, e.g. 0.03.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command()(verify)
    app.command()(sign)
    app.command()(compare)
    app.command()(gate)


def verify(
    runs: Annotated[list[Path], typer.Argument(help="Sealed run folders.")],
    signed_by: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Fail unless this Ed25519 public key signed each run."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Hash every file of a sealed run and derive every number again from the raw records."""
    from finalbench.bundle import verify as verify_bundle

    results = []
    for run in runs:
        shown = _Shown(run, quiet=as_json)
        result = verify_bundle(run, signed_by=signed_by, found=shown.problem)
        shown.end(result)
        results.append((run, result))
    if as_json:
        found = [{"run": str(run)} | result.model_dump(mode="json") for run, result in results]
        print_json({"schema_version": 1, "runs": found})
    if not all(result.ok for _, result in results):
        raise typer.Exit(5)


class _Shown:
    """A run's check as lines, each problem as soon as it is known."""

    def __init__(self, run: Path, *, quiet: bool) -> None:
        self._run, self._quiet, self._broken = run, quiet, False

    def problem(self, problem: Problem) -> None:
        if not self._broken:
            self._say(f"{self._run}: BROKEN")
            self._broken = True
        field = f", {problem.field}" if problem.field else ""
        self._say(f"  {problem.file}{field}: {problem.message}")

    def end(self, result: Verification) -> None:
        signed = f"signed by {result.signed_by[:16]}" if result.signed_by else ""
        if not self._broken:
            self._say(f"{self._run}: ok{signed and f', {signed}'}")
        elif signed:
            self._say(f"  {signed}")

    def _say(self, line: str) -> None:
        if not self._quiet:
            typer.echo(line)


def sign(
    runs: Annotated[list[Path], typer.Argument(help="Sealed run folders.")],
    key: Annotated[Path, typer.Option(help="PEM file of an unencrypted Ed25519 private key.")],
    as_json: JsonOption = False,
) -> None:
    """Sign seals with a key of yours, after verifying each run. Replaces an older signature.

    A key: `openssl genpkey -algorithm ed25519 -out KEY.pem`. Readers check with `verify`.
    """
    from finalbench.bundle import sign_sealed

    public = [sign_sealed(run, key) for run in runs]
    if as_json:
        rows = [{"run": str(r), "public_key": p} for r, p in zip(runs, public, strict=True)]
        print_json({"schema_version": 1, "signed": rows})
        return
    for run, name in zip(runs, public, strict=True):
        typer.echo(f"{run}: signed by {name}")


def compare(
    baseline: Annotated[Path, typer.Argument(help="The older run.")],
    candidate: Annotated[Path, typer.Argument(help="The newer run.")],
    margin: MarginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Every cell of two runs side by side. Informs; only `gate` passes or fails."""
    result = _judge(baseline, candidate, margin, family="all")
    _show(result, as_json=as_json)
    if result.outcome == "incomparable":
        raise typer.Exit(result.exit_code)


def gate(
    baseline: BaselineOption,
    candidate: Annotated[Path | None, typer.Option(help="The run to judge.")] = None,
    margin: MarginOption = None,
    target: Annotated[
        float | None, typer.Option(help="Refuse to judge if an effect of this size is not seen.")
    ] = None,
    family: Annotated[str, typer.Option(help="Cells that can fail: `base` or `all`.")] = "base",
    anchor: Annotated[Path | None, typer.Option(help="An old release's run, for drift.")] = None,
    confirm: Annotated[
        list[Path] | None, typer.Option(help="Further candidate runs; all must show it.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Also write JUnit XML here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write Markdown here.")] = None,
    pin: Annotated[
        Path | None, typer.Option(help="Pin this sealed run as the baseline; judges nothing.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Pass or fail a candidate: exit 0, 1 regression or divergence, 5 incomparable, 6 open."""
    from finalbench.errors import UsageError
    from finalbench.gate import refresh_pin, to_junit, to_markdown, write_step_summary
    from finalbench.record import write_atomic

    if pin is not None:
        refresh = refresh_pin(baseline, pin)
        if as_json:
            print_json({"schema_version": 1, **refresh.model_dump(mode="json")})
        else:
            typer.echo(refresh.text)
        return
    if candidate is None:
        raise UsageError("gate: name the run to judge with --candidate")
    if family not in ("base", "all"):
        raise UsageError(f"--family {family}: must be base or all")
    result = _judge(
        baseline,
        candidate,
        margin,
        family=family,
        target=target,
        anchor=anchor,
        confirmations=confirm or [],
    )
    if junit is not None:
        write_atomic(junit, to_junit(result).encode())
    if markdown is not None:
        write_atomic(markdown, to_markdown(result).encode())
    if summary := os.environ.get(STEP_SUMMARY_VARIABLE):
        write_step_summary(result, Path(summary))
    _show(result, as_json=as_json)
    raise typer.Exit(result.exit_code)


def _judge(baseline: Path, candidate: Path, margin: float | None, **options: object) -> GateResult:
    from finalbench.gate import gate as judge

    if margin is not None:
        options["margin"] = margin
    return judge(baseline, candidate, **options)  # ty: ignore[invalid-argument-type]


def _show(result: GateResult, *, as_json: bool) -> None:
    from finalbench.gate import to_json, to_markdown

    if as_json:
        print_json(to_json(result))
    else:
        typer.echo(to_markdown(result).rstrip("\n"))
