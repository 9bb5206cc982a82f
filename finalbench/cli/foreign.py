"""`import`: what another tool's result file says, in our terms or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finalbench.cli.options import JsonOption, print_json

if TYPE_CHECKING:
    from finalbench.metrics import CellRow
    from finalbench.metrics.foreign import Foreign


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("import")(import_results)


def import_results(
    files: Annotated[
        list[Path],
        typer.Argument(help="Result files of vLLM bench, SGLang bench, AIPerf or GuideLLM."),
    ],
    beside: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Also show the same metrics of this run's base cells."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read others' result files by formula, not by name; what differs is refused with its reason.

    Imported values are as reported: they have no raw records, so they are in no ranking or gate.
    """
    from finalbench.metrics.foreign import read_foreign

    found = {path: read_foreign(path) for path in files}
    ours = {} if beside is None else _base_values(beside)
    if as_json:
        print_json(
            {
                "schema_version": 1,
                "status": "as reported by its tool, not recomputed",
                "files": [
                    {"file": str(path), **foreign.model_dump(mode="json")}
                    for path, foreign in found.items()
                ],
                "beside": ours,
            }
        )
        return
    for path, foreign in found.items():
        _show(path, foreign, ours)


def _show(path: Path, foreign: Foreign, ours: Mapping[str, Mapping[str, float]]) -> None:
    from finalbench.metrics import metric

    counts = f"{foreign.completed} completed, {foreign.failed} failed"
    typer.echo(f"{path}: {foreign.tool}, {counts}; as reported, not recomputed")
    for value in foreign.values:
        if value.metric is None or value.value is None:
            typer.echo(f"  {value.field}: refused: {value.reason}")
            continue
        unit = metric(value.metric).unit
        line = f"  {value.metric} = {value.value:.6g} {unit} (mean, from {value.field})"
        for arm, values in ours.items():
            if value.metric in values:
                line += f"; {arm} here {values[value.metric]:.6g}"
        typer.echo(line)


def _base_values(run_dir: Path) -> dict[str, dict[str, float]]:
    """Arm -> metric -> value of its base cell, where the cell is valid. Means for latencies."""
    from finalbench.aggregate import analyse

    rows = analyse(run_dir).rows
    return {r.cell.arm: _values(r.cell) for r in rows if r.cell.axis == "base" and r.valid}


def _values(cell: CellRow) -> dict[str, float]:
    found: dict[str, Any] = {name: rate.value for name, rate in cell.rates.items()}
    found |= {name: latency.mean for name, latency in cell.latencies.items()}
    return {name: value for name, value in found.items() if value is not None}
