"""Send a planned upload in one commit, and propose its entry to the model's own repository."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finalbench.hub.dataset import INDEX_FILE, read_index
from finalbench.hub.errors import hub_errors
from finalbench.hub.plan import Proposal, Upload
from finalbench.hub.retry import Sleep, open_pull_request, persist
from finalbench.scenario import Frozen

if TYPE_CHECKING:
    from huggingface_hub import HfApi


class Applied(Frozen):
    """What came of an upload or a proposal. `attempts` counts commits tried."""

    repo: str
    commit: str | None
    pull_request: str | None
    attempts: int
    already_there: bool = False


def apply_upload(
    upload: Upload,
    *,
    create_pr: bool = False,
    visibility: Literal["public", "private"] = "public",
    api: HfApi | None = None,
    sleep: Sleep = time.sleep,
) -> Applied:
    """Create the dataset where it is missing, then commit on top of the head just read.

    A conflict re-reads the two shared files only. After an answer got lost the head, or the list of
    open pull requests, is read first: what did arrive is not sent twice.
    Errors: `EnvironmentMissing` as in `hub_errors`.
    """
    from huggingface_hub import HfApi

    hub = api or HfApi()

    def attempt(number: int) -> Applied:
        head, index = _head(hub, upload.repo_id)
        if any((row.run, row.root) == (upload.run_id, upload.row.root) for row in index.rows):
            return _there(upload.repo_id, number, commit=head)
        if create_pr and (url := open_pull_request(hub, upload.repo_id, "dataset", upload.message)):
            return _there(upload.repo_id, number, pull_request=url)
        change = _Change(upload.repo_id, "dataset", upload.files(index.text), upload.message)
        return change.commit(hub, head, number, create_pr=create_pr)

    with hub_errors(upload.repo_id):
        hub.create_repo(upload.repo_id, repo_type="dataset", visibility=visibility, exist_ok=True)
        return persist(attempt, upload.repo_id, sleep)


def apply_proposal(
    proposal: Proposal, *, api: HfApi | None = None, sleep: Sleep = time.sleep
) -> Applied:
    """Open the pull request, unless the same entry is there or proposed already.

    Errors: `EnvironmentMissing` as in `hub_errors`; a model's repository is never created.
    """
    from huggingface_hub import HfApi

    hub = api or HfApi()

    def attempt(number: int) -> Applied:
        head = str(hub.repo_info(proposal.repo_id, repo_type="model").sha)
        if _text(hub, proposal.repo_id, "model", proposal.path, head) == proposal.content.decode():
            return _there(proposal.repo_id, number, commit=head)
        if url := open_pull_request(hub, proposal.repo_id, "model", proposal.title):
            return _there(proposal.repo_id, number, pull_request=url)
        files = {proposal.path: proposal.content}
        change = _Change(proposal.repo_id, "model", files, proposal.title, proposal.description)
        return change.commit(hub, head, number, create_pr=True)

    with hub_errors(proposal.repo_id):
        return persist(attempt, proposal.repo_id, sleep)


class _Index:
    """The shared index as the Hub holds it; unreadable rows stop an upload before it starts."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.rows = read_index(text)


def _head(hub: HfApi, repo_id: str) -> tuple[str, _Index]:
    """The head commit, and the shared index at exactly that commit."""
    head = str(hub.repo_info(repo_id, repo_type="dataset").sha)
    return head, _Index(_text(hub, repo_id, "dataset", INDEX_FILE, head) or "")


def _text(hub: HfApi, repo_id: str, repo_type: str, name: str, revision: str) -> str | None:
    """A file of a repository at a revision, or None where there is none."""
    from huggingface_hub.errors import EntryNotFoundError

    with tempfile.TemporaryDirectory() as folder:
        try:
            path = hub.hf_hub_download(
                repo_id, name, repo_type=repo_type, revision=revision, cache_dir=folder
            )
        except EntryNotFoundError:
            return None
        return Path(path).read_text(encoding="utf-8")


def _there(
    repo_id: str, number: int, *, commit: str | None = None, pull_request: str | None = None
) -> Applied:
    return Applied(
        repo=repo_id,
        commit=commit,
        pull_request=pull_request,
        attempts=number - 1,
        already_there=True,
    )


@dataclass(frozen=True, slots=True)
class _Change:
    """One commit to be."""

    repo_id: str
    repo_type: str
    files: Mapping[str, bytes]
    message: str
    description: str | None = None

    def commit(self, hub: HfApi, head: str, number: int, *, create_pr: bool) -> Applied:
        """On top of `head`, or refused by the Hub when that is no longer the head."""
        from huggingface_hub import CommitOperationAdd

        done = hub.create_commit(
            self.repo_id,
            [CommitOperationAdd(path, content) for path, content in self.files.items()],
            repo_type=self.repo_type,
            commit_message=self.message,
            commit_description=self.description,
            parent_commit=head,
            create_pr=create_pr,
        )
        return Applied(
            repo=self.repo_id,
            commit=done.oid,
            pull_request=done.pr_url if create_pr else None,
            attempts=number,
        )
