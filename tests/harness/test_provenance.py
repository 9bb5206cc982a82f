"""Where the code of a run came from."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from finalbench import provenance

ME = ("-c", "user.name=a", "-c", "user.email=a@example.org")


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the tests are run by a hook of git."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *ME, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of this module alone, which takes itself for the one that runs."""
    folder = tmp_path / "finalbench"
    folder.mkdir()
    shutil.copy(provenance.__file__, folder)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    monkeypatch.setattr(provenance, "__file__", str(folder / "provenance.py"))
    return tmp_path


def found() -> tuple[str | None, bool | None]:
    made = provenance.collect({}, device="cpu")
    return made.git_commit, made.git_dirty


def test_the_commit_and_whether_files_differ(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert found() == (commit, False)
    (checkout / "results.txt").write_text("not tracked, so no change of the code")
    assert found() == (commit, False)
    with (checkout / "finalbench" / "provenance.py").open("a") as file:
        file.write("# changed\n")
    assert found() == (commit, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_checkout_of_another_user_is_still_known(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    for path in [checkout, *checkout.rglob("*")]:
        os.chown(path, 65534, 65534)
    assert found()[0] == commit


def test_a_copy_installed_inside_another_repository_has_no_commit(checkout: Path) -> None:
    git(checkout, "rm", "-q", "--cached", "finalbench/provenance.py")
    git(checkout, "commit", "-qm", "two", "--allow-empty")
    assert found() == (None, None)


def test_no_repository_at_all(checkout: Path) -> None:
    shutil.rmtree(checkout / ".git")
    assert found() == (None, None)
