"""What an upload will send, worked out without token or network. The plan is the upload."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finalbench import report
from finalbench.aggregate import Analysis, analyse
from finalbench.errors import UsageError
from finalbench.hub.dataset import (
    INDEX_FILE,
    README_FILE,
    IndexRow,
    index_text,
    merged,
    read_index,
    readme,
)
from finalbench.hub.eval_results import eval_results
from finalbench.hub.publishable import publishable, refuse_secrets
from finalbench.hub.redact import secret_values
from finalbench.hub.rows import cell_rows, leaderboard_rows, packed, request_rows
from finalbench.record import RunRecords, load_run
from finalbench.report import phrases
from finalbench.report.build import page_of

SCHEMA_VERSION = 1
SHARED = (INDEX_FILE, README_FILE)
_REPO_ID_PARTS = 2


@dataclass(frozen=True, slots=True)
class Proposal:
    """One file for a pull request to a model's repository: its `.eval_results` entry."""

    repo_id: str
    path: str
    content: bytes
    title: str
    description: str

    def document(self) -> dict[str, Any]:
        """What `upload --dry-run --json` prints of it."""
        return {
            "repo": self.repo_id,
            "repo_type": "model",
            "message": self.title,
            "description": self.description,
            "files": [_listed(self.path, self.content)],
        }


@dataclass(frozen=True, slots=True)
class Upload:
    """One run's upload: `own` files have paths of their own, shared ones are merged on the spot.

    `proposal`: the pull request to the model's repository, where one was asked for.
    """

    repo_id: str
    run_id: str
    own: Mapping[str, bytes]
    row: IndexRow
    notes: tuple[str, ...]
    proposal: Proposal | None = None

    def files(self, index: str = "") -> dict[str, bytes]:
        """Every file of the commit, given the index the Hub holds at that moment."""
        rows = merged(read_index(index), self.row)
        shared = {
            INDEX_FILE: index_text(rows).encode(),
            README_FILE: readme(self.repo_id, rows).encode(),
        }
        return dict(sorted({**self.own, **shared}.items()))

    @property
    def message(self) -> str:
        return f"Add run {self.run_id}"

    def document(self, index: str = "") -> dict[str, Any]:
        """What `upload --dry-run --json` prints; shared files as they are for this index."""
        return {
            "schema_version": SCHEMA_VERSION,
            "repo": self.repo_id,
            "repo_type": "dataset",
            "run": self.run_id,
            "message": self.message,
            "notes": list(self.notes),
            "files": [
                {**_listed(path, content), "shared": path in SHARED}
                for path, content in self.files(index).items()
            ],
            "pull_requests": [self.proposal.document()] if self.proposal else [],
        }


def _listed(path: str, content: bytes) -> dict[str, Any]:
    return {
        "path": path,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def plan_upload(
    run_dir: Path,
    repo_id: str,
    *,
    environment: Mapping[str, str],
    claims: Path | None = None,
    model_repo: str | None = None,
) -> Upload:
    """Work out every file. `environment` is searched for secrets only; nothing of it is sent.

    `model_repo`: also propose the run's `.eval_results` entry there.
    Errors: `UsageError` for a malformed repository name, or a run that may not be proposed;
    `BundleBroken` when the run is not sealed, does not verify, or still holds something that looks
    like a secret.
    """
    for option, name in (("--to", repo_id), ("--model-pr", model_repo)):
        parts = name.split("/") if name is not None else ["-", "-"]
        if len(parts) != _REPO_ID_PARTS or not all(parts):
            raise UsageError(f"{option} {name}: write it as ORG/NAME")
    with tempfile.TemporaryDirectory() as scratch:
        cleaned = publishable(run_dir, Path(scratch), environment)
        records, analysis = load_run(cleaned.folder), analyse(cleaned.folder)
        pages = Path(scratch) / "pages"
        report.render([cleaned.folder], pages, claims=claims)
        run_id = records.run.run_id
        own = {
            f"runs/{run_id}/{path.relative_to(cleaned.folder).as_posix()}": path.read_bytes()
            for path in sorted(cleaned.folder.rglob("*"))
            if path.is_file() and path.name != ".lock"
        }
        for name, target in (
            ("report.html", "index.html"),
            ("card.md", "card.md"),
            ("leaderboard.md", "leaderboard.md"),
        ):
            own[f"reports/{run_id}/{target}"] = (pages / name).read_bytes()
    kind = _add_tables(own, records, analysis)
    entry, refusal = eval_results(analysis, repo_id, on=_ended(records))
    if entry is not None:
        own[f"reports/{run_id}/eval_results.yaml"] = entry.encode()
    notes = []
    if cleaned.removed_from:
        notes.append(
            f"secrets were removed from {', '.join(cleaned.removed_from)}; the copy is sealed anew "
            f"(root {cleaned.root[:12]}, before {cleaned.original_root[:12]}) and unsigned"
        )
    if kind == "jsonl":
        notes.append("pyarrow is not installed: tables go as JSON lines (pip install '.[hub]')")
    if refusal:
        notes.append(f"no .eval_results entry: {refusal}")
    proposal = None
    if model_repo is not None:
        proposal = _proposal(records, repo_id, model_repo, entry, refusal)
    row = _index_row(records, analysis, cleaned.root, kind)
    upload = Upload(
        repo_id=repo_id,
        run_id=run_id,
        own=own,
        row=row,
        notes=tuple(notes),
        proposal=proposal,
    )
    packed_tables = (".parquet",)
    refuse_secrets(
        {path: data for path, data in upload.files().items() if not path.endswith(packed_tables)},
        secret_values(environment),
    )
    return upload


def _proposal(
    records: RunRecords, repo_id: str, model_repo: str, entry: str | None, refusal: str | None
) -> Proposal:
    """Errors: `UsageError` for another model's repository, or a run that is no result of it."""
    scenario = records.run.scenario
    source = scenario.model.source
    if source not in ("bundled", model_repo):
        raise UsageError(
            f"--model-pr {model_repo}: the run measured {source}",
            hint="an entry goes to the repository of the model that was measured",
        )
    if entry is None:
        raise UsageError(f"--model-pr {model_repo}: no entry for this run: {refusal}")
    where = f"https://huggingface.co/datasets/{repo_id}/tree/main/runs/{records.run.run_id}"
    return Proposal(
        repo_id=model_repo,
        # One file for each results dataset and task: a newer run replaces it, others stay.
        path=f".eval_results/{repo_id.replace('/', '--')}--{scenario.name}.yaml",
        content=entry.encode(),
        title=f"Add decode speed of run {records.run.run_id}",
        description=f"Measured by finalbench and unverified until somebody repeats it. {where}",
    )


def _add_tables(own: dict[str, bytes], records: RunRecords, analysis: Analysis) -> str:
    """Put the three tables among the files; returns their format."""
    kind = "parquet"
    for name, rows in (
        ("leaderboard", leaderboard_rows(analysis)),
        ("cells", cell_rows(analysis)),
        ("requests", request_rows(records, analysis)),
    ):
        kind, content = packed(rows)
        own[f"data/{name}/{records.run.run_id}.{kind}"] = content
    return kind


def _index_row(records: RunRecords, analysis: Analysis, root: str, kind: str) -> IndexRow:
    headline = page_of([(records, analysis)]).headlines[0]
    return IndexRow.model_validate(
        {
            "run": records.run.run_id,
            "root": root,
            "model": analysis.model,
            "hardware": analysis.hardware,
            "scenario": analysis.scenario,
            "headline": phrases.headline_sentence(headline),
            "classes": phrases.join_words(phrases.mark_words(headline.marks)),
            "host": records.run.provenance.host,
            "format": kind,
        }
    )


def _ended(records: RunRecords) -> str:
    last = records.run.rolls[-1] if records.run.rolls else None
    return ((last.ended_utc or last.started_utc) if last else "")[:10]
