"""Send a planned upload in one commit, and survive other writers and a service that stumbles."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finalbench.errors import EnvironmentMissing
from finalbench.hub.dataset import INDEX_FILE, read_index
from finalbench.hub.errors import hub_errors, status_of
from finalbench.hub.plan import Upload
from finalbench.scenario import Frozen

if TYPE_CHECKING:
    from huggingface_hub import HfApi

ATTEMPTS = 6
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
_CONFLICTS = (409, 412)


class Applied(Frozen):
    """What came of an upload. `attempts` counts commits tried."""

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
    sleep: Callable[[float], None] = time.sleep,
) -> Applied:
    """Create the dataset where it is missing, then commit on top of the head just read.

    A conflict re-reads the two shared files only. After an answer got lost the head is read first:
    a commit that did arrive is not sent twice. Errors: `EnvironmentMissing` as in `hub_errors`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    hub = api or HfApi()
    with hub_errors(upload.repo_id):
        hub.create_repo(upload.repo_id, repo_type="dataset", visibility=visibility, exist_ok=True)
        wait_s = FIRST_WAIT_S
        for attempt in range(1, ATTEMPTS + 1):
            head, index = _head(hub, upload.repo_id)
            if any((row.run, row.root) == (upload.run_id, upload.row.root) for row in index.rows):
                return Applied(
                    repo=upload.repo_id,
                    commit=head,
                    pull_request=None,
                    attempts=attempt - 1,
                    already_there=True,
                )
            try:
                return _commit(hub, upload, index.text, head, create_pr, attempt)
            except HfHubHTTPError as error:
                status = status_of(error)
                lost = status is None or status >= 500
                if create_pr and lost:
                    raise  # a second try could open a second pull request
                if status not in (*_CONFLICTS, 429) and not lost:
                    raise
                if attempt < ATTEMPTS:
                    sleep(0.0 if status in _CONFLICTS else _wait(error, wait_s))
                    wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    raise EnvironmentMissing(
        f"{upload.repo_id} stayed busy for {ATTEMPTS} attempts; nothing was sent",
        hint="try again later; the plan stays the same",
    )


class _Index:
    """The shared index as the Hub holds it; unreadable rows stop an upload before it starts."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.rows = read_index(text)


def _head(hub: HfApi, repo_id: str) -> tuple[str, _Index]:
    """The head commit, and the shared index at exactly that commit."""
    from huggingface_hub.errors import EntryNotFoundError

    head = str(hub.repo_info(repo_id, repo_type="dataset").sha)
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = hub.hf_hub_download(
                repo_id, INDEX_FILE, repo_type="dataset", revision=head, cache_dir=folder
            )
            text = Path(path).read_text(encoding="utf-8")
        except EntryNotFoundError:
            text = ""
    return head, _Index(text)


def _commit(
    hub: HfApi, upload: Upload, index: str, head: str, create_pr: bool, attempt: int
) -> Applied:
    from huggingface_hub import CommitOperationAdd

    operations = [
        CommitOperationAdd(path_in_repo=path, path_or_fileobj=content)
        for path, content in upload.files(index).items()
    ]
    done = hub.create_commit(
        upload.repo_id,
        operations,
        repo_type="dataset",
        commit_message=upload.message,
        parent_commit=head,
        create_pr=create_pr,
    )
    return Applied(
        repo=upload.repo_id,
        commit=done.oid,
        pull_request=done.pr_url if create_pr else None,
        attempts=attempt,
    )


def _wait(error: Exception, fallback_s: float) -> float:
    """Seconds the server asks for (`RateLimit: "api";r=0;t=55`, or Retry-After), else ours."""
    headers = getattr(getattr(error, "response", None), "headers", {}) or {}
    for part in str(headers.get("RateLimit", "")).split(";"):
        name, _, value = part.strip().partition("=")
        if name == "t" and value.isdigit():
            return min(float(value), LONGEST_WAIT_S)
    after = str(headers.get("Retry-After", ""))
    return min(float(after), LONGEST_WAIT_S) if after.isdigit() else fallback_s
