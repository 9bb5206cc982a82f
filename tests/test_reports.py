"""reports/ is what the committed records give, byte for byte, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_reports_are_what_the_records_give(tmp_path: Path) -> None:
    """The recipe of `make report`, into another folder. When it differs: run `make report`."""
    recipe = re.search(
        r"^\t(\$\(BIN\)/finalbench report .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert recipe is not None
    words = recipe[1].split()
    assert words[1] == "report" and "results/reference/*" in words
    runs = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "results/reference").iterdir())]
    command = [sys.executable, "-m", "finalbench", "report", *runs, "--out", str(tmp_path)]
    command += ["--claims", "results/claims.yaml"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    made = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    kept = {
        p.relative_to(ROOT / "reports"): p.read_bytes()
        for p in (ROOT / "reports").rglob("*")
        if p.is_file()
    }
    assert sorted(made) == sorted(kept), "run `make report` and commit reports/"
    differing = [str(name) for name in made if made[name] != kept[name]]
    assert differing == [], "run `make report` and commit reports/"
