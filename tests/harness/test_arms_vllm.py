"""Whole runs with a server that has vLLM's flags, log, routes and counters beside VK."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from finalbench.aggregate import analyse
from finalbench.arms import ENGINES
from finalbench.bundle import seal
from finalbench.errors import EnvironmentMissing
from finalbench.record import load_run
from finalbench.report import render
from finalbench.report.markdown import plain
from finalbench.runner import Options, Outcome, Silent, execute
from finalbench.scenario import Scenario, load_scenario, parse_override

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SHAPE = HERE.parents[1] / "scenarios" / "shapes" / "qwen35-35b-a3b" / "config.json"


@pytest.fixture(autouse=True)
def one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finalbench.provenance._git", lambda folder: ("c" * 40, False))


def scenario(folder: Path, *overrides: str) -> Scenario:
    """The big scenario on a CPU, with a shape whose vocabulary the toy knows."""
    small = json.loads(SHAPE.read_text())
    small["text_config"]["vocab_size"] = 200
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(small))
    texts = (
        "arms=[vk,vllm]",
        "baseline=vllm",
        f"model.path={folder}",
        "model.dtype=float32",
        "hardware={device: cpu, devices: 1, memory_gb: 1}",
        "serving.weights=random:1",
        "serving.threads=1",
        "drafts.mtp3.acceptance=0.8",
        "axes.seq_len=[32]",
        "axes.output_len=[24]",
        "axes.sampling=[greedy]",
        "axes.draft=[none,mtp3]",
        "base={seq_len: 32, output_len: 24, sampling: greedy, draft: mtp3}",
        "workload.text_class=random",
        "workload.requests=3",
        "measure.blocks=2",
        "measure.client_ceiling=false",
        "measure.start_timeout_s=90.0",
    )
    found = [parse_override(text) for text in (*texts, *overrides)]
    return load_scenario("qwen35-35b-a3b", found)


def run(tmp_path: Path, fake: str = "step_ms=8", *overrides: str, **extra: str) -> Outcome:
    environment = os.environ | {
        "FINALBENCH_VK": f"{sys.executable} {HERE / 'fake_vk.py'}",
        "VK_FAKE": "vk:ok,step_ms=8,weights=random:1",
        "FINALBENCH_VLLM": f"{sys.executable} {HERE / 'fake_vllm.py'}",
        "FAKE_VLLM": fake,
        **extra,
    }
    return execute(
        scenario(tmp_path / "shape", *overrides),
        Options(results=tmp_path / "results", environment=environment),
        Silent(),
    )


def test_vk_and_vllm_are_measured_side_by_side(tmp_path: Path) -> None:
    outcome = run(
        tmp_path,
        "step_ms=8,start_s=1.5",
        VLLM_USE_FLASHINFER_SAMPLER="0",
        VLLM_API_KEY="hidden",
        FINALBENCH_VLLM_ARGS="--gdn-prefill-backend triton",
    )
    records = load_run(outcome.path)
    assert outcome.run.status == "complete" and not outcome.run.failures
    # One process for each of vLLM's draft settings, one for all of VK's, in each of two blocks.
    assert [s.arm for s in records.servers].count("vllm") == 4
    assert [s.arm for s in records.servers].count("vk") == 2
    theirs = [s for s in records.servers if s.arm == "vllm"]
    for server in theirs:
        settings = server.settings or {}
        assert settings["nonce"] == server.nonce != ""
        assert settings == server.settings_after
        assert settings["weights"] == "random" and settings["dtype"] == "float32"
        assert settings["versions"] == {"vllm": "0.26.0"}
        assert settings["graph_mode"] == "full_and_piecewise"
        assert settings["variables"] == {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        assert server.start_seconds is not None and server.start_seconds > 1.5
        assert server.command[-2:] == ("--gdn-prefill-backend", "triton")
        assert "--skip-tokenizer-init" in server.command and "dummy" in server.command
    drafted = [s for s in theirs if "--speculative-config" in s.command]
    assert {json.loads(s.command[s.command.index("--speculative-config") + 1])["method"]
            for s in drafted} == {"mtp"}  # fmt: skip
    assert {(s.settings or {})["draft_default"]["k"] for s in drafted} == {3}
    # Ids count the tokens; the acceptance length comes from /metrics over the cell alone.
    assert {r.token_source for r in records.requests} == {"ids"}
    seal(outcome.path)
    analysis = analyse(outcome.path)
    rows = {(r.cell.arm, r.cell.draft_label): r for r in analysis.rows}
    assert set(rows) == {(a, d) for a in ("vk", "vllm") for d in ("none", "mtp3@0.8")}
    row = rows["vllm", "mtp3@0.8"]
    received = sum(len(r.token_ids) for r in records.requests if r.cell_id == row.cell.id
                   and not r.warmup)  # fmt: skip
    windows = [w for s in drafted for w in s.windows]
    assert sum(w.generation_tokens or 0 for w in windows) == received == 3 * 24 * 2
    assert row.cell.acceptance.drafts == sum(w.spec.drafts for w in windows) > 0
    assert row.cell.acceptance_length == pytest.approx(
        rows["vk", "mtp3@0.8"].cell.acceptance_length, rel=0.35
    )
    # Draft for draft: VK with drafts against vLLM with the same.
    against = rows["vk", "mtp3@0.8"].comparison
    assert against is not None and against.against_cell == row.cell.id
    assert against.ratio is not None
    invalid = {v.message for v in analysis.violations if v.severity == "invalid"}
    assert invalid == set()
    assert (row.marks.weights, row.marks.acceptance) == ("random", "synthetic")
    card = next(p for p in render([outcome.path], tmp_path / "out") if p.name == "card.md")
    text = card.read_text()
    assert "Exploratory: vLLM holds random weights of its own" in text
    for difference in ENGINES["vllm"].differs:
        assert plain(difference) in text


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        ("dtype=bfloat16", "runs with dtype 'bfloat16', asked for 'float32'"),
        ("name=other", "its nonce is not ours"),
    ],
)
def test_another_server_than_asked_for_is_refused(tmp_path: Path, fake: str, reason: str) -> None:
    outcome = run(tmp_path, fake, "measure.blocks=1")
    assert outcome.run.status == "partial"
    assert any(reason in failure.reason for failure in outcome.run.failures)


def test_a_missing_command_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="vLLM's command `vllm` is not installed"):
        run(tmp_path, FINALBENCH_VLLM="", PATH=str(tmp_path))
