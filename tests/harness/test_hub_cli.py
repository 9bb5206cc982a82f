"""`upload` and `pull` as typed, in a process of their own, with HF_ENDPOINT at the fake Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import report_runs as runs

from finalbench.bundle import seal
from finalbench.testing.fake_hub import FakeHub

pytestmark = pytest.mark.slow

SMALL = ("workload.requests=2", "measure.blocks=2", "axes.seq_len=[512]")


def typed(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-m", "finalbench", *words],
        capture_output=True,
        text=True,
        env={**kept, **environment},
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = runs.make_run(tmp_path_factory.mktemp("runs"), runs.scenario(*SMALL))
    seal(path)
    return path


def test_dry_run_then_upload_then_pull(run_dir: Path, tmp_path: Path) -> None:
    home = str(tmp_path / "hf")
    words = ("upload", str(run_dir), "--to", "lab/results", "--model-pr", "lab/vk-tiny")
    dry = typed(*words, "--dry-run", "--json", HF_HOME=home, HF_HUB_OFFLINE="1")
    assert dry.returncode == 0, dry.stderr
    plan = json.loads(dry.stdout)
    with FakeHub() as fake:
        fake.store.create("model", "lab/vk-tiny")
        hub = {"HF_HOME": home, "HF_ENDPOINT": fake.endpoint, "HF_TOKEN": "hf_write"}
        sent = typed(*words, "--json", **hub)
        assert sent.returncode == 0, sent.stderr
        document = json.loads(sent.stdout)
        assert document.pop("applied")["commit"] == fake.store.log("dataset", "lab/results")[0].oid
        [proposed] = document.pop("proposed")
        assert proposed["pull_request"].endswith("/lab/vk-tiny/discussions/1")
        assert document == plan
        [entry] = plan["pull_requests"][0]["files"]
        assert entry["path"] in fake.store.files("model", "lab/vk-tiny", "refs/pr/1")
        held = fake.store.files("dataset", "lab/results")
        assert {f["path"] for f in plan["files"]} == set(held) - {".gitattributes"}
        got = typed("pull", "lab/results", "--results-dir", str(tmp_path / "out"), **hub)
        assert got.returncode == 0, got.stderr
    assert (tmp_path / "out" / run_dir.name / "manifest.json").is_file()
    board = (tmp_path / "out" / "report" / "leaderboard.md").read_text()
    assert run_dir.name in board and "unverified" in board


@pytest.mark.parametrize(
    ("words", "environment", "code", "said"),
    [
        (("--to", "nowhere"), {}, 2, "ORG/NAME"),
        (("--to", "lab/x"), {"HF_HUB_OFFLINE": "1"}, 3, "HF_HUB_OFFLINE"),
        (("--to", "lab/x"), {"HF_ENDPOINT": "http://127.0.0.1:9"}, 3, "cannot be reached"),
    ],
)
def test_each_refusal_is_one_line_and_its_exit_code(
    run_dir: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    environment: dict[str, str],
    code: int,
    said: str,
) -> None:
    done = typed("upload", str(run_dir), *words, HF_HOME=str(tmp_path), **environment)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
