"""The gate on real runs of one commit: quiet about nothing, loud about a planted ten percent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3000)]

SLOW_VK = Path(__file__).parent / "slow_vk.py"
# Few blocks where the machine is quiet enough, more where they cannot tell ten percent.
BLOCKS = (6, 14)
SMALL = (
    "workload.requests=5",
    "axes.seq_len=[64]",
    "axes.output_len=[48]",
    "axes.sampling=[greedy]",
    "axes.draft=[none]",
    "base={seq_len: 64, output_len: 48, sampling: greedy, draft: none}",
    "measure.bare_loop=false",
    "measure.client_ceiling=false",
)


def finalbench(*words: str, slowdown: float = 0.0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "FINALBENCH_VK": f"{sys.executable} {SLOW_VK}",
        "VK_SLOWDOWN": str(slowdown),
    }
    environment.pop("GITHUB_STEP_SUMMARY", None)
    command = [sys.executable, "-m", "finalbench", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def a_run(results: Path, blocks: int, *, slowdown: float = 0.0) -> Path:
    """Engine and stock, so that a machine that grows slower between runs cancels."""
    words = ["run", "--model=vk-tiny", f"--blocks={blocks}", "--fresh", "--json"]
    words += [f"--set={text}" for text in SMALL]
    done = finalbench(*words, f"--results-dir={results}", slowdown=slowdown)
    assert done.returncode == 0, done.stderr
    return results / json.loads(done.stdout)["run"]


def gate(baseline: Path, candidate: Path, *more: str) -> tuple[int, dict[str, Any]]:
    done = finalbench("gate", f"--baseline={baseline}", f"--candidate={candidate}", "--json", *more)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"], done.stderr
    return done.returncode, document


def test_the_same_commit_passes_or_is_open_and_ten_percent_slower_fails(tmp_path: Path) -> None:
    for blocks in BLOCKS:
        baseline = a_run(tmp_path / "a", blocks)
        same = a_run(tmp_path / "b", blocks)
        code, document = gate(baseline, same)
        if code == 1:
            # One comparison in forty calls noise slower; a fresh run must not confirm it.
            again = a_run(tmp_path / "again", blocks)
            code, document = gate(baseline, same, f"--confirm={again}")
        (cell,) = document["cells"]
        assert code in (0, 6), document["reasons"]
        assert cell["verdict"] in ("EQUIVALENT", "INCONCLUSIVE", "FASTER")
        assert 0 < cell["detectable"] < 1
        assert document["detectable"] == cell["detectable"]

        slower = a_run(tmp_path / "slow", blocks, slowdown=0.11)  # a tenth less tok/s
        code, document = gate(baseline, slower)
        (cell,) = document["cells"]
        if code == 6 and cell["detectable"] > 0.1 and blocks != BLOCKS[-1]:
            continue  # too noisy for so few blocks, as the gate itself says
        assert cell["method"] == "ratio"
        assert code == 1, document["reasons"]
        assert document["outcome"] == "regression"
        assert cell["verdict"] == "SLOWER"
        # One interval in twenty misses the truth; one twice as wide hardly ever.
        low, high = cell["interval"]
        assert low - (high - low) / 2 < 0.9 < high + (high - low) / 2, cell["interval"]
        return
