"""`claim`: list, show, add, check, replicate, contest."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finalbench.cli.options import JsonOption, print_json

if TYPE_CHECKING:
    from finalbench.claims import Claim

app = typer.Typer(no_args_is_help=True, help="The claims ledger: who says what, and what backs it.")

LedgerOption = Annotated[Path, typer.Option("--ledger", help="The ledger's file.")]
IdArgument = Annotated[str, typer.Argument(metavar="CLAIM", help="The claim's id.")]
RunArgument = Annotated[Path, typer.Argument(help="A sealed, complete run.")]
ByOption = Annotated[str, typer.Option("--by", help="Who ran it.")]
DEFAULT_LEDGER = Path("results/claims.yaml")


def register(root: typer.Typer) -> None:
    """Add the group to the app."""
    root.add_typer(app, name="claim")


@app.command("list")
def list_claims(ledger: LedgerOption = DEFAULT_LEDGER, as_json: JsonOption = False) -> None:
    """Every claim with its state, in words made from its fields."""
    from finalbench.claims import load_ledger

    claims = load_ledger(ledger).claims
    if as_json:
        print_json({"schema_version": 1, "claims": [_document(claim) for claim in claims]})
        return
    for claim in claims:
        typer.echo(_line(claim))


@app.command("show")
def show(
    claim_id: IdArgument, ledger: LedgerOption = DEFAULT_LEDGER, as_json: JsonOption = False
) -> None:
    """One claim: its source, what it does not state, its evidence and its history."""
    from finalbench.claims import load_ledger

    claim = load_ledger(ledger).get(claim_id)
    if as_json:
        print_json({"schema_version": 1, "claim": _document(claim)})
        return
    typer.echo(_line(claim))
    typer.echo(f"source: {claim.source.who}, {claim.source.title}")
    typer.echo(f"not stated: {', '.join(claim.unknown) or 'nothing'}")
    for item in claim.evidence:
        typer.echo(f"{item.on} {item.kind} by {item.by}: {item.ratio:.3g}x, {item.verdict}")
    for move in claim.history:
        typer.echo(f"{move.on} {move.before} -> {move.after}: {move.reason}")


@app.command("add")
def add(
    claim_id: IdArgument,
    run: RunArgument,
    who: Annotated[str, typer.Option(help="Who claims it.")],
    title: Annotated[str, typer.Option(help="Where it is said.")],
    ledger: LedgerOption = DEFAULT_LEDGER,
    as_json: JsonOption = False,
) -> None:
    """Claim a sealed run's headline, with its conditions and digests."""
    from finalbench.claims import Ledger, claim_of, load_ledger, open_bundle, save_ledger
    from finalbench.errors import UsageError

    book = load_ledger(ledger) if ledger.exists() else Ledger()
    if any(claim.id == claim_id for claim in book.claims):
        raise UsageError(f"claim {claim_id!r} is in {ledger} already")
    claim = claim_of(open_bundle(run), claim_id=claim_id, who=who, title=title, on=_today())
    save_ledger(ledger, book.put(claim))
    _tell(claim, as_json=as_json)


@app.command("check")
def check_claims(
    run: RunArgument, ledger: LedgerOption = DEFAULT_LEDGER, as_json: JsonOption = False
) -> None:
    """Mark claims stale whose named digests are no longer those of a run."""
    from finalbench.claims import check, load_ledger, open_bundle, save_ledger

    book, bundle = load_ledger(ledger), open_bundle(run)
    changed: dict[str, list[str]] = {}
    for claim in book.claims:
        if claim.scenario != bundle.run.scenario.name:
            continue
        moved, reasons = check(claim, bundle.digests, on=_today())
        if reasons:
            changed[claim.id] = reasons
            book = book.put(moved)
    if changed:
        save_ledger(ledger, book)
    if as_json:
        print_json({"schema_version": 1, "stale": changed})
        return
    for claim_id, reasons in changed.items():
        typer.echo(f"{claim_id}: stale: {'; '.join(reasons)}")
    if not changed:
        typer.echo("no claim is stale")


@app.command("replicate")
def replicate_claim(
    claim_id: IdArgument,
    run: RunArgument,
    by: ByOption,
    ledger: LedgerOption = DEFAULT_LEDGER,
    as_json: JsonOption = False,
) -> None:
    """Hold an independent run against a claim; an equivalent one lifts its state."""
    from finalbench.claims import load_ledger, open_bundle, replicate, save_ledger

    book = load_ledger(ledger)
    claim = replicate(book.get(claim_id), open_bundle(run), by=by, on=_today())
    save_ledger(ledger, book.put(claim))
    _tell(claim, as_json=as_json)


@app.command("contest")
def contest_claim(
    claim_id: IdArgument,
    run: RunArgument,
    by: ByOption,
    ledger: LedgerOption = DEFAULT_LEDGER,
    as_json: JsonOption = False,
) -> None:
    """Hold a contradicting run against a claim."""
    from finalbench.claims import contest, load_ledger, open_bundle, save_ledger

    book = load_ledger(ledger)
    claim = contest(book.get(claim_id), open_bundle(run), by=by, on=_today())
    save_ledger(ledger, book.put(claim))
    _tell(claim, as_json=as_json)


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def _document(claim: Claim) -> dict[str, object]:
    body = claim.model_dump(mode="json")
    return body | {"text": claim.text(), "unknown": list(claim.unknown)}


def _line(claim: Claim) -> str:
    from finalbench.report.phrases import STATUS_WORDS

    return f"{claim.id}: {STATUS_WORDS[claim.status]}: {claim.model}: {claim.text()}"


def _tell(claim: Claim, *, as_json: bool) -> None:
    if as_json:
        print_json({"schema_version": 1, "claim": _document(claim)})
    else:
        typer.echo(_line(claim))
