"""The main job with the real engine and the real small model, through the command line alone."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = Path(__file__).parents[2] / "engine" / "models" / "vk-tiny"
SMALL = (
    "--blocks=1",
    "--set=workload.requests=2",
    "--set=axes.seq_len=[128]",
    "--set=axes.output_len=[32]",
    "--set=axes.draft=[none,mtp3,ngram3]",
    "--set=base={seq_len: 128, output_len: 32, sampling: greedy, draft: mtp3}",
    "--set=measure.bare_loop=false",
    "--set=measure.client_ceiling=false",
)


def run(results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "finalbench", "run", "--model", "vk-tiny", "--json"]
    return subprocess.run(
        [*command, *arguments, "--results-dir", str(results)],
        capture_output=True,
        text=True,
        check=False,
    )


def cells(document: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    return [cell for cell in document["cells"] if cell["arm"] == arm]


def test_a_small_run_is_complete_valid_and_lossless(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["status"] == "complete"
    drafted = [c for c in cells(document, "vk") if c["draft"]["method"] != "none"]
    assert {c["draft"]["method"] for c in drafted} == {"mtp", "ngram"}
    for cell in cells(document, "vk"):
        assert cell["valid"], cell["violations"]
        if cell["sampling"] == "greedy":
            assert cell["equality"] == "identical" or cell["equality"].startswith("ties(")
    mtp = next(c for c in drafted if c["draft"]["method"] == "mtp")
    assert mtp["acceptance_length"] > 1.3
    (folder,) = tmp_path.glob("*/run.json")
    again = subprocess.run(
        [sys.executable, "-m", "finalbench", "verify", str(folder.parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stdout


def test_drafts_on_equal_drafts_off_token_for_token(tmp_path: Path) -> None:
    from finalbench.record import load_run

    done = run(tmp_path, *SMALL, "--arms=vk")
    assert done.returncode in (0, 4), done.stderr
    records = load_run(next(tmp_path.glob("*/run.json")).parent)
    outputs: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for request in records.requests:
        if not request.warmup:
            cell = records.run.plan.cell(request.cell_id)
            key = (cell.sampling.name, request.prompt_digest)
            outputs.setdefault(key, set()).add(request.token_ids)
    assert {name for name, _ in outputs} == {"greedy", "t07"}
    assert all(len(found) == 1 for found in outputs.values())


@pytest.mark.nightly  # an interval needs a machine with nothing else running
def test_the_headline_holds(tmp_path: Path) -> None:
    """One stream, greedy, fp32, equal threads: at least 3.5 times stock, and MTP is a gain."""
    done = run(
        tmp_path,
        "--blocks=3",
        "--set=axes.seq_len=[512]",
        "--set=axes.sampling=[greedy]",
        "--set=axes.draft=[none,mtp3]",
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    head = document["headline"]
    assert head["verdict"] == "FASTER"
    assert head["ratio_interval"][0] > 3.5, head
    rates = {c["draft"]["method"]: c["decode_tok_s"] for c in cells(document, "vk")}
    assert rates["mtp"] > rates["none"]
    assert document["bare_loop"]["share"] >= 0.95, document["bare_loop"]


def copy_model(folder: Path) -> Path:
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.py", "*.md"))
    return folder


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def edit_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header of a safetensors file; the data stay."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def wrong_shape(folder: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        name = next(n for n in header if n.endswith("norm.weight") and "layers" not in n)
        header[name]["shape"] = [header[name]["shape"][0] // 2, 2]

    edit_header(folder, change)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (no_weights, "safetensors"),
        (cut_weights, "model.safetensors"),
        (wrong_shape, "norm.weight"),
    ],
)
def test_a_damaged_checkpoint_is_one_line_and_exit_3(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    folder = copy_model(tmp_path / "model")
    damage(folder)
    done = run(tmp_path / "results", *SMALL, f"--checkpoint={folder}", "--quiet")
    assert done.returncode == 3, done.stderr
    assert done.stdout == ""
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert said in line
    assert "Traceback" not in done.stderr


def test_a_checkpoint_folder_that_is_not_there_is_exit_3(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, "--checkpoint=/no/such/folder", "--quiet")
    assert done.returncode == 3
    assert "a checkpoint of vk-tiny at /no/such/folder" in done.stderr
    assert "hf download" not in done.stderr  # it comes with the engine; there is no such page


def test_drafting_without_its_tensors_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    only = ("--set=axes.sampling=[greedy]", "--set=axes.draft=[none,mtp3]", "--arms=vk")
    done = run(tmp_path / "results", *SMALL, *only, f"--checkpoint={folder}", "--quiet")
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert line == "error: vk: cannot draft with mtp: tensor mtp.fc.weight is missing"
    # Without drafts the same checkpoint serves.
    plain = ("--set=axes.sampling=[greedy]", "--set=axes.draft=[none]", "--set=base.draft=none")
    done = run(tmp_path / "results", *SMALL, *plain, "--arms=vk", f"--checkpoint={folder}")
    assert json.loads(done.stdout)["status"] == "complete", done.stderr
