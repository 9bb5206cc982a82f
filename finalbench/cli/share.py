"""`upload` and `pull`: a run to the Hub and others' runs from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finalbench.cli.options import DEFAULT_RESULTS, JsonOption, ResultsOption, print_json

if TYPE_CHECKING:
    from finalbench.hub import Upload

ToOption = Annotated[str, typer.Option("--to", metavar="ORG/NAME", help="The results dataset.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command()(upload)
    app.command()(pull)


def upload(
    run: Annotated[Path, typer.Argument(help="A sealed run.")],
    to: ToOption,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be sent; needs no token or network.")
    ] = False,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")
    ] = False,
    model_pr: Annotated[
        str | None,
        typer.Option(
            "--model-pr",
            metavar="ORG/MODEL",
            help="Also propose the run's .eval_results entry to the model's own repository.",
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make the dataset private, if it is new.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Publish a run in one commit: bundle, tables, card, page. Secrets are removed or block it.

    The token comes from the Hub's own places (HF_TOKEN, `hf auth login`, a trusted publisher).
    """
    from finalbench.hub import apply_proposal, apply_upload, plan_upload

    planned = plan_upload(run, to, environment=os.environ, model_repo=model_pr)
    document = planned.document()
    if dry_run:
        if as_json:
            print_json(document)
        else:
            typer.echo(_listing(planned))
        return
    done = [
        apply_upload(planned, create_pr=create_pr, visibility="private" if private else "public")
    ]
    if planned.proposal is not None:
        done.append(apply_proposal(planned.proposal))
    if as_json:
        applied = [item.model_dump(mode="json") for item in done]
        print_json({**document, "applied": applied[0], "proposed": applied[1:]})
        return
    for note in planned.notes:
        typer.echo(f"note: {note}", err=True)
    for item in done:
        where = item.pull_request or f"commit {item.commit}"
        typer.echo(f"{item.repo}: {'already there, ' if item.already_there else ''}{where}")


def pull(
    dataset: Annotated[str, typer.Argument(metavar="ORG/NAME", help="A results dataset.")],
    results_dir: ResultsOption = DEFAULT_RESULTS / "pulled",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch every run of a dataset, verify each from its raw records, keep those that hold.

    All runs in the folder, from whatever dataset, then share one leaderboard in `report/`.
    """
    from finalbench.hub import pull as fetch

    found = fetch(dataset, results_dir, revision=revision)
    files = _one_leaderboard(results_dir) if any(item.path for item in found) else []
    if as_json:
        runs = [item.model_dump(mode="json") for item in found]
        print_json({"schema_version": 1, "runs": runs, "files": [str(path) for path in files]})
    else:
        for item in found:
            typer.echo(f"{item.run}: {'refused, ' + item.problem if item.problem else item.path}")
        for path in files[:2]:
            typer.echo(str(path))
    if any(item.problem for item in found):
        raise typer.Exit(5)


def _one_leaderboard(folder: Path) -> list[Path]:
    from finalbench.report import render

    runs = [path.parent for path in sorted(folder.glob("*/run.json"))]
    return render(runs, folder / "report")


def _listing(planned: Upload) -> str:
    files = planned.document()["files"]
    lines = [f"{file['bytes']:>10}  {file['path']}" for file in files]
    total = sum(file["bytes"] for file in files)
    lines.append(f"{total:>10}  bytes in {len(files)} files to {planned.repo_id}, one commit")
    if (proposal := planned.proposal) is not None:
        lines.append(f"{len(proposal.content):>10}  {proposal.path}")
        lines.append(f"{'':>10}  as a pull request to {proposal.repo_id}: {proposal.title}")
    lines += [f"note: {note}" for note in planned.notes]
    return "\n".join(lines)
