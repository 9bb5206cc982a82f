"""Options that several commands share, and how they become a Scenario."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from finalbench.scenario import Override, Scenario

RESULTS_VARIABLE = "FINALBENCH_RESULTS_DIR"


def complete_scenario(incomplete: str) -> list[str]:
    """Scenario names for shell completion."""
    from finalbench.scenario import scenario_files

    return [name for name in scenario_files() if name.startswith(incomplete)]


ScenarioArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[SCENARIO]",
        help="A scenario's name or YAML file.",
        autocompletion=complete_scenario,
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="The same, by model name.", autocompletion=complete_scenario
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a key; the value is YAML."),
]
WeightsOption = Annotated[
    str | None, typer.Option(help="`auto`, or `random:SEED` for random weights of the true shape.")
]
BlocksOption = Annotated[int | None, typer.Option(help="Replicates: fresh servers per arm.")]
ArmsOption = Annotated[str | None, typer.Option(help="Comma-separated, for example `vk,stock`.")]
GridOption = Annotated[
    str | None, typer.Option(help="`star` varies one axis at a time, `full` all of them.")
]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads of every server.")]
CheckpointOption = Annotated[
    Path | None, typer.Option(help="Folder with config.json and safetensors.")
]
ResultsOption = Annotated[
    Path, typer.Option(help="Where runs are kept.", envvar=RESULTS_VARIABLE, show_envvar=True)
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
DEFAULT_RESULTS = Path("results")


def overrides_of(
    *,
    sets: list[str] | None,
    weights: str | None,
    blocks: int | None,
    arms: str | None,
    grid: str | None,
    threads: int | None,
    checkpoint: Path | None,
) -> list[Override]:
    """Flags after `--set`, since later ones win: defaults < YAML < --set < flags."""
    from finalbench.arms import default_baseline
    from finalbench.scenario import Override, parse_override

    flags: list[tuple[str, str, Any]] = [
        ("serving.weights", "--weights", weights),
        ("measure.blocks", "--blocks", blocks),
        ("grid", "--grid", grid),
        ("serving.threads", "--threads", threads),
        ("model.path", "--checkpoint", str(checkpoint.resolve()) if checkpoint else None),
    ]
    chosen = [parse_override(text) for text in sets or []]
    chosen += [
        Override(path, value, f"{flag} {value}") for path, flag, value in flags if value is not None
    ]
    if arms is not None:
        names = [name.strip() for name in arms.split(",") if name.strip()]
        chosen.append(Override("arms", names, f"--arms {arms}"))
        if "stock" not in names:
            # First, so that `--set baseline=...` can still name another one.
            chosen.insert(0, Override("baseline", default_baseline(names), f"--arms {arms}"))
    return chosen


def resolve(scenario: str | None, model: str | None, overrides: list[Override]) -> Scenario:
    """The scenario asked for, with this machine's cores where no thread count is set."""
    from finalbench.arms import arm
    from finalbench.errors import UsageError
    from finalbench.provenance import usable_cores
    from finalbench.scenario import load_scenario

    if scenario and model and scenario != model:
        raise UsageError(f"name one: scenario {scenario!r} or --model {model!r}")
    name = scenario or model
    if name is None:
        raise UsageError("which model? try `finalbench run --model vk-tiny`")
    resolved = load_scenario(name, overrides)
    for arm_name in resolved.arms:
        arm(arm_name)
    if resolved.serving.threads is None:
        serving = resolved.serving.model_copy(update={"threads": usable_cores()})
        resolved = resolved.model_copy(update={"serving": serving})
    return resolved


def share(option: str, text: str) -> float:
    """`3%` or `0.03` as 0.03. Errors: `UsageError` for what is no share above 0."""
    from finalbench.errors import UsageError

    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise UsageError(f"{option} {text}: write it as 3% or 0.03")
    return value


def environment() -> dict[str, str]:
    """A copy of the environment; the CLI is the only place that reads it."""
    return dict(os.environ)


def print_json(document: Any) -> None:
    """The one document of `--json`, on stdout."""
    typer.echo(json.dumps(document, indent=1, ensure_ascii=False))
