"""The suite's own rules: where CI says so, a test that is left out is a failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_runs():
    pass

def test_left_out():
    pytest.skip("no engine")

@pytest.mark.skipif(True, reason="guidellm is not installed")
def test_of_another_program():
    pass
"""


@pytest.mark.parametrize(("ci", "code"), [("0", 0), ("1", 1)])
def test_a_skip_is_a_failure_in_ci(tmp_path: Path, ci: str, code: int) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_one')\n")
    command = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", tmp_path],
        cwd=tmp_path,
        env=os.environ | {"FINALBENCH_TESTS_NO_SKIPS": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == bool(code), done.stdout
    assert ("test_left_out did not run: Skipped: no engine" in done.stdout) == bool(code)
    assert ("test_module.py did not run" in done.stdout) == bool(code)
    assert "test_of_another_program did not run" not in done.stdout
