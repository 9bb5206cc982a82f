"""Case R03 in a whole run: planted secrets reach neither its records nor its bundle."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import zstandard

from finalbench.bundle import seal, verify
from finalbench.hub.redact import REMOVED
from finalbench.runner import Options, Silent, execute
from finalbench.runner.clean import Cleaner
from finalbench.scenario import load_scenario, parse_override

HERE = Path(__file__).parent
# Put together here, so that no scanner trips over them.
BODY = "Zq7" * 14
KEY, TOKEN, PLAIN = "sk-" + BODY[:30], "hf_" + BODY[:30], "plain" + BODY[:12]


def everything(folder: Path) -> str:
    parts = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.suffix == ".zst":
                reader = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
                data = reader.read()
            parts.append(data.decode("utf-8", "replace"))
    return "\n".join(parts)


@pytest.mark.slow
def test_planted_secrets_never_reach_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the environment, a server's arguments, its log, its answers' errors, and a prompt's."""
    monkeypatch.setattr("finalbench.provenance._git", lambda folder: ("c" * 40, False))
    server = tmp_path / "leaky.py"
    server.write_text(
        "import os, sys\n"
        "print('Authorization: Bearer', os.environ['MY_API_KEY'], 'tokenizer ok', flush=True)\n"
        "print('token_count: 17', 'pass', os.environ['LAB_PASSWORD'], flush=True)\n"
        f"os.execv(sys.executable, [sys.executable, {str(HERE / 'fake_vllm.py')!r},\n"
        "  *[w for w in sys.argv[1:] if w not in ('--api-key', os.environ['LAB_PASSWORD'])]])\n"
    )
    texts = (
        "arms=[vk,vllm]", "baseline=vllm", "serving.threads=1", "axes.seq_len=[32]",
        "axes.output_len=[8]", "axes.sampling=[greedy]", "axes.draft=[none]",
        "base={seq_len: 32, output_len: 8, sampling: greedy, draft: none}",
        "workload.requests=2", "measure.blocks=1", "measure.bare_loop=false",
        "measure.client_ceiling=false", "measure.start_timeout_s=30.0",
    )  # fmt: skip
    environment = os.environ | {
        "MY_API_KEY": KEY,
        "HF_TOKEN": TOKEN,
        "LAB_PASSWORD": PLAIN,
        "VLLM_API_KEY": PLAIN,
        "FINALBENCH_VK": f"{sys.executable} {HERE / 'fake_vk.py'}",
        # Every request fails, and the reason quotes the key.
        "VK_FAKE": f"vk:ok,step_ms=1,fail_share=1.0,fail_text={KEY}",
        "FINALBENCH_VLLM": f"{sys.executable} {server}",
        "FINALBENCH_VLLM_ARGS": f"--api-key {PLAIN}",
    }
    outcome = execute(
        load_scenario("vk-tiny", [parse_override(text) for text in texts]),
        Options(results=tmp_path / "results", environment=environment),
        Silent(),
    )
    seal(outcome.path)
    assert verify(outcome.path).ok
    found = everything(outcome.path)
    for secret in (KEY, TOKEN, PLAIN):
        assert secret not in found
    assert f"HTTP 500: {REMOVED}" in found  # the error is there, without the key
    assert "--api-key" in found and "tokenizer ok" in found and "token_count: 17" in found


def test_a_command_keeps_what_is_needed_to_repeat_it() -> None:
    cleaner = Cleaner.of({"HF_TOKEN": TOKEN})
    words = ["vllm", "serve", "m", "--api-key", "abc", "--max-tokens", "5", "--skip-tokenizer-init"]
    words += ["--api-key-env", "NAME", "--hf-token=abc", "--note", TOKEN, "--seed", "0"]
    assert cleaner.command(words) == (
        "vllm", "serve", "m", "--api-key", REMOVED, "--max-tokens", "5", "--skip-tokenizer-init",
        "--api-key-env", "NAME", f"--hf-token={REMOVED}", "--note", REMOVED, "--seed", "0",
    )  # fmt: skip
