"""Every kernel of a round compiles for GPUs that are not here, without spills, with wide loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("compile_round.py")


def compiled(model: str, k: int, arch: int, script: Path = SCRIPT) -> list[dict[str, Any]]:
    """In a process of its own: the interpreter and the compiler do not share one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), model, str(k), str(arch)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("model", "k", "arch"),
    [("qwen35-35b-a3b", 0, 90), ("qwen35-35b-a3b", 3, 90), ("qwen36-27b", 0, 100)],
)
def test_round_compiles(model: str, k: int, arch: int) -> None:
    kernels = compiled(model, k, arch)
    names = {kernel["kernel"] for kernel in kernels}
    assert {"gemv_kernel", "gdn_kernel", "split_kernel", "combine_kernel", "sample_kernel"} <= names
    for kernel in kernels:
        assert kernel["stack"] == 0, f"{kernel['kernel']} spills {kernel['stack']} bytes"
        assert kernel["shared"] <= 228 * 1024
        if kernel["kernel"] in ("gemv_kernel", "gate_up_kernel", "down_kernel", "route_kernel"):
            assert kernel["wide_loads"] > 0, f"{kernel['kernel']} reads weights in small pieces"


@pytest.mark.parametrize(("model", "arch"), [("qwen35-35b-a3b", 90), ("qwen36-27b", 100)])
def test_prefill_compiles(model: str, arch: int) -> None:
    kernels = compiled(model, 1000, arch, SCRIPT.with_name("compile_prefill.py"))
    names = {kernel["kernel"] for kernel in kernels}
    assert {"enter_kernel", "block_kernel", "scan_kernel", "attend_kernel"} <= names
    for kernel in kernels:
        # The attention tile spills a little once, where it ends.
        allowed = 512 if kernel["kernel"] == "attend_kernel" else 0
        assert kernel["stack"] <= allowed, f"{kernel['kernel']} spills {kernel['stack']} bytes"
        assert kernel["shared"] <= 227 * 1024
