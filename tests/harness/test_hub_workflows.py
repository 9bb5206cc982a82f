"""action.yml and the workflows: pinned, least privilege, nothing of a caller's text in a script."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FILES = [ROOT / "action.yml", *WORKFLOWS]
PINNED = re.compile(r"^[\w.-]+/[\w./-]+@[0-9a-f]{40}$")


def load(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> Iterator[dict[str, Any]]:
    document = load(path)
    if "runs" in document:
        yield from document["runs"]["steps"]
    for job in document.get("jobs", {}).values():
        yield from job["steps"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_action_is_pinned_by_hash_with_its_version_beside(path: Path) -> None:
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used
    for name in used:
        assert name.startswith("./") or PINNED.match(name), name
    for line in path.read_text().splitlines():
        if "uses:" in line and "@" in line:
            assert re.search(r"# v\d+\.\d+\.\d+$", line), line


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_expression_is_pasted_into_a_script(path: Path) -> None:
    for step in steps(path):
        assert "${{" not in step.get("run", ""), step["name"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_permissions_are_none_unless_a_job_asks(path: Path) -> None:
    document = load(path)
    assert document["permissions"] == {}
    # YAML 1.1 reads the key `on` as true.
    assert "pull_request_target" not in document[True] and "workflow_run" not in document[True]
    for job in document["jobs"].values():
        assert "timeout-minutes" in job
        runs_code = any("checkout" in step.get("uses", "") for step in job["steps"])
        writes = {name for name, level in job["permissions"].items() if level == "write"}
        assert not runs_code or writes <= {"id-token"}


def test_checkouts_leave_no_credentials_behind() -> None:
    for path in WORKFLOWS:
        for step in steps(path):
            if "checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_scripts_are_valid_bash(path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    for step in steps(path):
        if "run" in step:
            subprocess.run([bash, "-n"], input=step["run"], text=True, check=True)


def options(text: str, command: str) -> set[str]:
    """The long options of one call of `finalbench COMMAND` in a script."""
    call = re.search(rf'finalbench"? {command} (?:.*\\\n)*.*', text)
    assert call is not None
    return set(re.findall(r" (--[a-z-]+)", call[0]))


def test_make_gate_does_what_the_action_does() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile[makefile.index("\ngate:") :]
    action = (ROOT / "action.yml").read_text()
    for command in ("run", "gate"):
        here, there = options(recipe, command), options(action, command)
        assert len(there) >= 4
        assert here == there - ({"--json"} if command == "gate" else set())


def zizmor(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "zizmor"), "--offline", "--quiet", "--no-config"]
    return subprocess.run([*command, "."], cwd=folder, capture_output=True, text=True, check=False)


def test_zizmor_finds_nothing_here_and_what_is_planted(tmp_path: Path) -> None:
    for path in FILES:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    clean = zizmor(tmp_path)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    action = tmp_path / "action.yml"
    action.write_text(re.sub(r"@[0-9a-f]{40} # (v\d+)", r"@\1 #", action.read_text()))
    assert "unpinned-uses" in zizmor(tmp_path).stdout


def verdict_script() -> str:
    return next(
        step["run"]
        for step in load(ROOT / "action.yml")["runs"]["steps"]
        if step["name"] == "Verdict"
    )


@pytest.mark.parametrize(
    ("run_code", "gate_code", "expected"),
    [("0", "", 0), ("0", "0", 0), ("0", "1", 1), ("0", "6", 6), ("4", "0", 4), ("0", "5", 5)],
)
def test_inconclusive_and_failed_runs_are_never_green(
    run_code: str, gate_code: str, expected: int
) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    environment = {"RUN_CODE": run_code, "GATE_CODE": gate_code}
    done = subprocess.run(
        [bash, "-e", "-c", verdict_script()], env=environment, check=False, capture_output=True
    )
    assert done.returncode == expected
