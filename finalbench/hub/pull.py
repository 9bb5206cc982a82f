"""Fetch others' bundles from a results dataset; what does not verify is refused by name."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from finalbench.bundle import MANIFEST_FILE, read_manifest, verify
from finalbench.hub.errors import hub_errors
from finalbench.scenario import Frozen

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# A run's name and its files, without a way out of the folder.
_BUNDLE_FILE = re.compile(
    r"^runs/(?P<run>[A-Za-z0-9][A-Za-z0-9._-]*)/(?P<file>[A-Za-z0-9][\w./-]*)$"
)


class Pulled(Frozen):
    """One run of the dataset. `problem` says why it was not kept."""

    run: str
    path: str | None
    root: str | None
    problem: str | None = None


def pull(
    repo_id: str, out_dir: Path, *, revision: str | None = None, api: HfApi | None = None
) -> list[Pulled]:
    """Fetch every run, verify it from its raw records, keep what holds under `out_dir/<run>`.

    A run already there is left alone when its seal is the same, refused when it is another.
    Errors: `EnvironmentMissing` for network, token and service.
    """
    from huggingface_hub import HfApi

    hub = api or HfApi()
    with hub_errors(repo_id), tempfile.TemporaryDirectory() as scratch:
        names = hub.list_repo_files(repo_id, repo_type="dataset", revision=revision)
        runs: dict[str, list[str]] = {}
        for name in sorted(names):
            match = _BUNDLE_FILE.match(name)
            if match and ".." not in name.split("/"):
                runs.setdefault(match["run"], []).append(name)
        for files in runs.values():
            for name in files:
                hub.hf_hub_download(
                    repo_id, name, repo_type="dataset", revision=revision, local_dir=scratch
                )
        return [_keep(Path(scratch) / "runs" / run, out_dir / run) for run in runs]


def _keep(fetched: Path, target: Path) -> Pulled:
    checked = verify(fetched)
    if not checked.ok:
        first = checked.problems[0]
        place = f"{first.file}: {first.field}" if first.field else first.file
        return Pulled(
            run=fetched.name, path=None, root=checked.root, problem=f"{place}: {first.message}"
        )
    if checked.run_id != fetched.name:
        problem = f"it is sealed as {checked.run_id}"
        return Pulled(run=fetched.name, path=None, root=checked.root, problem=problem)
    if (target / MANIFEST_FILE).is_file() and read_manifest(target).root != checked.root:
        problem = f"{target} holds another seal of the same name"
        return Pulled(run=fetched.name, path=None, root=checked.root, problem=problem)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(fetched, target)
    return Pulled(run=fetched.name, path=str(target), root=checked.root)
