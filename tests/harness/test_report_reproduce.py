"""Case G16: the commands on a card are parsed out of it, executed, and give a comparable bundle.

On `vk-tiny` with the real engine, in a plan of few requests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from finalbench import report
from finalbench.bundle import verify
from finalbench.record import load_run

TYPED = (
    "finalbench run --model vk-tiny --arms vk --threads 1 --blocks 1 --set workload.requests=2 "
    "--set workload.warmup_rounds=3 --set 'axes.seq_len=[64]' --set 'axes.output_len=[16]' "
    "--set 'axes.sampling=[greedy]' --set 'axes.draft=[none, mtp3]' "
    "--set 'base={seq_len: 64, output_len: 16, sampling: greedy, draft: mtp3}' "
    "--set measure.bare_loop=false --set measure.client_ceiling=false "
    "--results-dir kept --no-progress --json"
)
DONE = (0, 4)  # 4: a row that a busy machine made invalid
SET_UP = ("git checkout ", "python -m venv ", "pip install ")


def blocks(card: str) -> list[str]:
    """The commands of the section `Reproduce`, one text a block."""
    section = card[card.index("\n## Reproduce") :]
    return [match[2] for match in re.finditer(r"(`{3,})bash\n(.*?)\n\1", section, re.DOTALL)]


def execute(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FINALBENCH_")}
    environment = {**kept, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def outputs(run: Path) -> dict[tuple[str, int], tuple[int, ...]]:
    """Token ids of each timed request; greedy, so a second run must give the same."""
    found = {
        (r.cell_id, r.prompt_index): r.token_ids for r in load_run(run).requests if not r.warmup
    }
    assert found and all(found.values())
    return found


@pytest.mark.slow
def test_the_reproduction_block_runs_and_its_bundle_is_comparable(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    made = execute(TYPED, first)
    assert made.returncode in DONE, made.stderr
    original = first / "kept" / json.loads(made.stdout)["run"]
    report.render([original], first / "out")
    again, check = blocks((first / "out" / "card.md").read_text())

    lines = again.splitlines()
    steps = [line for line in lines if not line.startswith(SET_UP)]
    assert len(lines) - len(steps) >= 2  # set-up is stated; this environment already is that
    commit = next((line.split()[-1] for line in lines if line.startswith("git checkout ")), None)
    assert commit == load_run(original).run.provenance.git_commit

    done = execute("\n".join(steps), second)
    assert done.returncode in DONE, done.stderr
    (repeated,) = [p.parent for p in (second / "kept").glob("*/run.json")]
    assert load_run(repeated).run.plan.hash == load_run(original).run.plan.hash
    assert verify(repeated).ok
    assert outputs(repeated) == outputs(original)
    assert execute(check, first).returncode == 0

    compared = execute(f"finalbench compare {original} {repeated} --json", tmp_path)
    assert compared.returncode == 0, compared.stdout + compared.stderr
