"""`verify`, `compare`, `gate`, `claim` as typed: each calls its function, ends by its code."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import report_runs as runs

from finalbench.__main__ import main
from finalbench.bundle import seal
from finalbench.claims import load_ledger

SMALL = ("workload.requests=2", "measure.blocks=3", "axes.seq_len=[512]")


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Typed = Callable[..., Ended]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """The command in this process, from its words to its exit code."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def call(*words: str, **environment: str) -> Ended:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["finalbench", *words])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return Ended(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = runs.make_run(tmp_path_factory.mktemp("runs"), runs.scenario(*SMALL))
    seal(path)
    return path


def test_verify_names_the_damaged_file(typed: Typed, run_dir: Path, tmp_path: Path) -> None:
    assert typed("verify", str(run_dir)).returncode == 0
    copy = tmp_path / run_dir.name
    copy.mkdir()
    for path in run_dir.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    servers = copy / "servers.jsonl"
    servers.write_bytes(servers.read_bytes().replace(b"vk", b"vx", 1))
    broken = typed("verify", str(copy), "--json")
    assert broken.returncode == 5
    (found,) = json.loads(broken.stdout)["runs"]
    assert "servers.jsonl" in {problem["file"] for problem in found["problems"]}


def test_gate_writes_every_format_and_ends_by_its_outcome(
    typed: Typed, run_dir: Path, tmp_path: Path
) -> None:
    junit, markdown, page = (tmp_path / name for name in ("j.xml", "v.md", "summary.md"))
    done = typed(
        "gate",
        f"--baseline={run_dir}",
        f"--candidate={run_dir}",
        f"--junit={junit}",
        f"--markdown={markdown}",
        "--json",
        GITHUB_STEP_SUMMARY=str(page),
    )
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"] in (0, 6), done.stderr
    assert ElementTree.parse(junit).getroot().tag == "testsuite"
    assert "finalbench gate" in markdown.read_text() == page.read_text()


def test_gate_pins_a_baseline_and_reads_it_back(
    typed: Typed, run_dir: Path, tmp_path: Path
) -> None:
    pin = tmp_path / "baseline.json"
    assert typed("gate", f"--baseline={pin}", f"--pin={run_dir}").returncode == 0
    again = typed("gate", f"--baseline={pin}", f"--candidate={run_dir}", "--json")
    assert json.loads(again.stdout)["baseline_run"] == run_dir.name


def test_compare_shows_every_cell(typed: Typed, run_dir: Path) -> None:
    done = typed("compare", str(run_dir), str(run_dir), "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["cells"]) > 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gate", "--baseline", "RUN"], "--candidate"),
        (["gate", "--baseline", "RUN", "--candidate", "RUN", "--family", "x"], "base or all"),
        (["gate", "--baseline", "nowhere", "--candidate", "RUN"], "neither a run folder"),
        (["claim", "show", "nothing", "--ledger", "LEDGER"], "no claim 'nothing'"),
    ],
)
def test_bad_input_is_exit_2(
    typed: Typed, run_dir: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    ledger = tmp_path / "claims.yaml"
    ledger.write_text("schema_version: 1\nclaims: []\n")
    known = {"RUN": str(run_dir), "LEDGER": str(ledger)}
    done = typed(*(known.get(word, word) for word in words))
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_a_claim_is_added_shown_and_listed(typed: Typed, run_dir: Path, tmp_path: Path) -> None:
    ledger = f"--ledger={tmp_path / 'claims.yaml'}"
    added = typed("claim", "add", "mine", str(run_dir), "--who=us", "--title=a page", ledger)
    assert added.returncode == 0, added.stderr
    assert load_ledger(tmp_path / "claims.yaml").get("mine").status == "self-reported"
    assert (
        typed("claim", "add", "mine", str(run_dir), "--who=us", "--title=x", ledger).returncode == 2
    )
    (row,) = json.loads(typed("claim", "list", ledger, "--json").stdout)["claims"]
    assert row["id"] == "mine"
    assert "self-reported" in typed("claim", "show", "mine", ledger).stdout
    # The same host cannot replicate its own claim.
    same = typed("claim", "replicate", "mine", str(run_dir), "--by=us", ledger)
    assert same.returncode == 5
    assert "no claim is stale" in typed("claim", "check", str(run_dir), ledger).stdout


def test_sign_and_verify_by_key(typed: Typed, run_dir: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    copy, key = tmp_path / run_dir.name, tmp_path / "key.pem"
    shutil.copytree(run_dir, copy)
    key.write_bytes(
        Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    signed = typed("sign", str(copy), f"--key={key}", "--json")
    (row,) = json.loads(signed.stdout)["signed"]
    assert typed("verify", str(copy), f"--signed-by={row['public_key']}").returncode == 0
    other = typed("verify", str(copy), f"--signed-by={'0' * 64}")
    assert other.returncode == 5
    assert "signed by" in other.stdout
    assert typed("sign", str(copy), f"--key={tmp_path / 'none.pem'}").returncode == 3


def test_import_takes_what_agrees_and_names_what_does_not(
    typed: Typed, run_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"
    bench = {"completed": 4, "failed": 0, "output_throughput": 55.0, "mean_ttft_ms": 40.0}
    file.write_text(json.dumps(bench))
    done = typed("import", str(file), f"--beside={run_dir}")
    assert done.returncode == 0, done.stderr
    assert "ttft_s = 0.04 s (mean, from mean_ttft_ms); vk here 0." in done.stdout
    assert "output_throughput: refused: its clock runs until" in done.stdout
    (found,) = json.loads(typed("import", str(file), "--json").stdout)["files"]
    assert found["tool"] == "vllm"
    file.write_text("{}")
    refused = typed("import", str(file))
    assert refused.returncode == 2
    assert "no result file of a known tool" in refused.stderr


def test_plan_prints_the_blocks_a_wanted_effect_needs(typed: Typed, run_dir: Path) -> None:
    words = typed("plan", "vk-tiny", "--detect=3%", "--cv=2%")
    assert "to see a change of 3.00% four times out of five: 10 blocks" in words.stdout
    document = json.loads(
        typed("plan", "vk-tiny", "--detect=0.03", f"--spread-of={run_dir}", "--json").stdout
    )
    assert document["sample_size"]["source"].startswith("3 blocks of vk against stock")
    assert typed("plan", "vk-tiny", "--detect=3x").returncode == 2
    assert typed("plan", "vk-tiny", "--cv=2%").returncode == 2
