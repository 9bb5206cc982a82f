"""Case G16: the commands on a card are parsed out of it, executed, and give a comparable bundle."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from finalbench import report
from finalbench.bundle import verify
from finalbench.record import load_run

ROOT = Path(__file__).parents[2]
FAKE_VK = f"{shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).parent / 'fake_vk.py'))}"
SET_UP = ("git checkout ", "python -m venv ", "pip install ")


def blocks(card: str) -> list[str]:
    """The commands of the section `Reproduce`, one text a block."""
    section = card[card.index("\n## Reproduce") :]
    return [match[2] for match in re.finditer(r"(`{3,})bash\n(.*?)\n\1", section, re.DOTALL)]


def execute(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "FINALBENCH_VK": FAKE_VK,
        "VK_FAKE": "vk:ok,step_ms=3;stock:ok,step_ms=6",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.slow
def test_the_reproduction_block_runs_and_its_bundle_is_comparable(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    typed = (
        "finalbench run --model vk-tiny --threads 1 --blocks 2 --set workload.requests=2 "
        "--set axes.seq_len=[512] --results-dir kept --no-progress --json"
    )
    made = execute(typed, first)
    assert made.returncode in (0, 4), made.stderr
    original = first / "kept" / json.loads(made.stdout)["run"]
    report.render([original], first / "out")
    again, check = blocks((first / "out" / "card.md").read_text())

    lines = again.splitlines()
    steps = [line for line in lines if not line.startswith(SET_UP)]
    assert len(lines) - len(steps) >= 2  # set-up is stated; this environment already is that
    commit = next((line.split()[-1] for line in lines if line.startswith("git checkout ")), None)
    assert commit == load_run(original).run.provenance.git_commit

    done = execute("\n".join(steps), second)
    assert done.returncode == made.returncode, done.stderr
    (repeated,) = [p.parent for p in (second / "kept").glob("*/run.json")]
    assert load_run(repeated).run.plan.hash == load_run(original).run.plan.hash
    assert verify(repeated).ok
    assert execute(check, first).returncode == 0

    compared = execute(f"finalbench compare {original} {repeated} --json", tmp_path)
    assert compared.returncode == 0, compared.stdout + compared.stderr
