"""Container and process runtime measure the same: paired blocks of the real engine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from own_daemon import Daemon

pytestmark = [pytest.mark.container, pytest.mark.nightly, pytest.mark.timeout(900)]

BLOCKS = 8
SMALL = (
    "axes.seq_len=[128]",
    "axes.output_len=[64]",
    "axes.sampling=[greedy]",
    "axes.draft=[none]",
    "base={seq_len: 128, output_len: 64, sampling: greedy, draft: none}",
    "workload.requests=6",
    "measure.bare_loop=false",
    "measure.client_ceiling=false",
)


def rate(runtime: str, environment: dict[str, str], results: Path) -> float:
    """Decode rate of one fresh server of the real engine on vk-tiny."""
    command = [sys.executable, "-m", "finalbench", "run", "vk-tiny", "--json", "--quiet", "--fresh"]
    command += ["--arms", "vk", "--blocks", "1", "--threads", "1", "--runtime", runtime]
    command += ["--results-dir", str(results)]
    command += [word for text in SMALL for word in ("--set", text)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    [cell] = json.loads(done.stdout)["cells"]
    return float(cell["decode_tok_s"])


def test_container_and_process_agree(
    engine: Daemon, environment: dict[str, str], tmp_path: Path
) -> None:
    pairs: list[tuple[float, float]] = []
    for block in range(BLOCKS):
        order = ("container", "process") if block % 2 == 0 else ("process", "container")
        found = {
            runtime: rate(
                runtime,
                environment if runtime == "container" else dict(os.environ),
                tmp_path / f"{block}-{runtime}",
            )
            for runtime in order
        }
        pairs.append((found["container"], found["process"]))
    ratios = sorted(container / process for container, process in pairs)
    middle = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"container / process: {middle:.4f}, blocks {[round(r, 3) for r in ratios]}")  # noqa: T201
    assert abs(middle - 1) < 0.05, ratios
