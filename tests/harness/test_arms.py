"""Command lines, words and read-back of servers of other projects, without starting one.

`peer_flags.json` holds every long flag of their servers, taken from their own parsers: vLLM's
`make_arg_parser`, SGLang's `ServerArgs.add_cli_args`, and `llama-server --help`. The nightly test
fetches those of vLLM and SGLang and parses our command lines with them (`tests/peer_parsers.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vkengine.config import KNOWN_SHAPES, read_config

from finalbench.arms import (
    ARMS,
    ENGINES,
    Settings,
    default_baseline,
    serve_command,
    server_settings,
    serves_draft,
    vocabulary_size,
)
from finalbench.arms.engine import nonce_of
from finalbench.client.tally import Tally
from finalbench.errors import UsageError
from finalbench.plan import make_plan
from finalbench.runtime.ready import ServerFailed, check_settings
from finalbench.scenario import DraftSetting, Scenario, load_scenario, parse_override

FLAGS = json.loads((Path(__file__).parent / "peer_flags.json").read_text())
ROOT = Path(__file__).parents[2]


def scenario(*overrides: str) -> Scenario:
    texts = ("serving.threads=4", "drafts.mtp3.acceptance=0.8", *overrides)
    return load_scenario("qwen35-35b-a3b", [parse_override(text) for text in texts])


def command(arm: str, draft: DraftSetting | None = None, *overrides: str) -> list[str]:
    settings = server_settings(arm, scenario(*overrides), draft)
    return serve_command(["X"], settings, host="127.0.0.1", port=8000, name="m--run-1a")


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("arm", ["vllm", "sglang", "llamacpp"])
@pytest.mark.parametrize("weights", ["auto", "random:1"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_flag_is_one_of_that_server(arm: str, weights: str, device: str) -> None:
    overrides = (f"serving.weights={weights}", f"serving.device={device}")
    drafts = [d for d in scenario(*overrides).drafts.values() if serves_draft(arm, d)]
    assert drafts
    for draft in drafts:
        words = command(arm, draft, *overrides)
        flags = {word for word in words if word.startswith("--")}
        assert flags <= set(FLAGS[arm]["flags"])


@pytest.mark.nightly  # fetches 350 MB
@pytest.mark.timeout(900)
def test_the_peers_own_parsers_take_every_command_line() -> None:
    script = ROOT / "tests" / "peer_parsers.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("vllm", "sglang"):
        assert f"{len(FLAGS[name]['flags'])} flags, 0 faults" in done.stdout
        assert name in done.stdout


def test_drafts_of_vllm_are_set_at_the_start() -> None:
    words = command("vllm", DraftSetting(method="mtp", k=3, acceptance=0.8))
    assert json.loads(value(words, "--speculative-config")) == {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.8, 0.64, 0.512],
    }
    words = command("vllm", DraftSetting(method="mtp", k=2))
    assert json.loads(value(words, "--speculative-config")) == {
        "method": "mtp",
        "num_speculative_tokens": 2,
    }
    assert "--speculative-config" not in command("vllm", DraftSetting())
    assert value(words, "--served-model-name") == "m--run-1a"
    assert "--no-enable-prefix-caching" in words and "--skip-tokenizer-init" not in words
    shape = command("vllm", None, "serving.weights=random:1")
    assert value(shape, "--load-format") == "dummy" and "--skip-tokenizer-init" in shape


def test_the_plan_leaves_out_what_a_server_cannot_draft() -> None:
    made = make_plan(scenario("arms=[vk,vllm,sglang]", "baseline=null"))
    drafts = {
        arm: {c.draft.label for c in made.cells if c.arm == arm} for arm in ("vk", "vllm", "sglang")
    }
    assert drafts["vk"] == {"none", "mtp1", "mtp2", "mtp3@0.8", "ngram3"}
    assert drafts["vllm"] == drafts["vk"] - {"ngram3"}
    assert drafts["sglang"] == drafts["vk"] - {"ngram3", "mtp3@0.8"}
    keys = {arm: {c.server_key for c in made.cells if c.arm == arm} for arm in drafts}
    assert [len(keys[arm]) for arm in drafts] == [1, 4, 3]  # drafts of VK need no restart
    assert {made.servers[k]["draft"] for k in keys["vllm"]} == drafts["vllm"]
    # Equal points pair across arms, whatever the drafts.
    assert {c.pair_key for c in made.cells if c.arm == "vllm"} <= {
        c.pair_key for c in made.cells if c.arm == "vk"
    }


@pytest.mark.parametrize(
    ("names", "baseline"),
    [
        (["vk", "stock", "vllm"], "stock"),
        (["vk", "vllm"], "vllm"),
        (["vk", "sglang", "vllm"], "sglang"),
        (["vk", "vk-aa"], None),
        (["vllm"], None),
    ],
)
def test_what_the_others_are_compared_with(names: list[str], baseline: str | None) -> None:
    assert default_baseline(names) == baseline


def test_request_words() -> None:
    body = {
        "prompt": [1],
        "draft": {"method": "mtp"},
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 3,
    }
    assert ENGINES["vk"].body(body) == body
    assert ENGINES["vllm"].body(body) == {k: v for k, v in body.items() if k != "draft"}
    theirs = ENGINES["llamacpp"].body(body)
    assert "draft" not in theirs and "repetition_penalty" not in theirs
    assert theirs["repeat_penalty"] == 1.0 and theirs["cache_prompt"] is False
    assert "repeat_last_n" not in theirs
    penal = ENGINES["llamacpp"].body(body | {"presence_penalty": 0.5})
    assert penal["repeat_last_n"] >= 8192
    assert body["draft"] == {"method": "mtp"}  # the caller's own is left alone


def llama_chunk(text: str, n: int, *, end: bool = False) -> bytes:
    reason = "length" if end else None
    document: dict[str, Any] = {
        "choices": [{"text": text, "index": 0, "finish_reason": reason}],
        "timings": {"prompt_n": 8, "cache_n": 0, "predicted_n": n},
    }
    if end:
        document["usage"] = {"prompt_tokens": 8, "completion_tokens": n}
    return json.dumps(document).encode()


def test_llama_cpp_counts_by_its_running_total() -> None:
    """A token inside a character is not sent by itself: four tokens in three chunks."""
    tally = Tally()
    sent = [("a", 1), ("é", 3), ("b", 4)]
    for at, (text, running) in enumerate(sent):
        tally.event(at, None, llama_chunk(text, running))
    tally.event(3, None, llama_chunk("", 4, end=True))
    totals = tally.totals()
    assert totals.chunks == ((0, 1), (1, 2), (2, 1))
    assert totals.usage is not None and totals.usage.completion == 4
    assert (totals.source, totals.usage_kind) == ("usage", "cumulative")


def test_llama_cpp_single_token() -> None:
    tally = Tally()
    tally.event(0, None, llama_chunk("a", 1))
    tally.event(1, None, llama_chunk("", 1, end=True))
    totals = tally.totals()
    assert totals.chunks == ((0, 1),) and totals.usage is not None
    assert totals.usage.completion == 1


SETTINGS: Settings = server_settings("vllm", scenario(), DraftSetting(method="mtp", k=3))
MODELS = {"data": [{"id": "qwen35-35b-a3b--run-1a2b", "max_model_len": 8464}]}
LINE = (
    "(EngineCore pid=7) INFO 12-01 01:00:00 [core.py:117] Initializing a V1 LLM engine (v0.26.0) "
    "with config: model='/m', speculative_config=SpeculativeConfig(method='mtp', model='/m', "
    "num_spec_tokens=3), tokenizer='/m', dtype=torch.bfloat16, max_seq_len=8464, "
    "load_format=dummy, quantization=None, enforce_eager=False, kv_cache_dtype=fp8, "
    "device_config=cuda, seed=0, enable_prefix_caching=False, "
    "compilation_config={'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>}"
)


def test_what_vllm_runs_with_is_read_from_its_pages_and_log() -> None:
    found = ENGINES["vllm"].effective({"/v1/models": MODELS}, f"noise\n{LINE}\n", SETTINGS)
    assert found["nonce"] == "1a2b"
    assert (found["dtype"], found["device"], found["weights"]) == ("bfloat16", "cuda", "random")
    assert found["draft_default"] == {
        "method": "mtp", "k": 3, "head_rows": None, "acceptance": None,
    }  # fmt: skip
    assert found["kv_cache_dtype"] == "fp8" and found["quantization"] is None
    assert found["graph_mode"] == "full_and_piecewise"
    assert found["versions"] == {"vllm": "0.26.0"} and found["read_from"][-1] == "log"
    check_settings(found, SETTINGS | {"weights": "random:7"}, nonce="1a2b")
    with pytest.raises(ServerFailed, match="weights"):
        check_settings(found, SETTINGS, nonce="1a2b")  # real ones were asked for
    # Without a log (an endpoint) nothing is made up.
    bare = ENGINES["vllm"].effective({"/v1/models": MODELS}, "", SETTINGS)
    assert "dtype" not in bare and "weights" not in bare and bare["read_from"][-1] == "/version"


def test_what_sglang_and_llama_cpp_tell() -> None:
    asked = server_settings("sglang", scenario(), DraftSetting(method="mtp", k=2))
    info = {
        "dtype": "bfloat16", "device": "cuda", "load_format": "auto", "version": "0.5.23",
        "speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "disable_radix_cache": True,
    }  # fmt: skip
    found = ENGINES["sglang"].effective({"/v1/models": MODELS, "/server_info": info}, "", asked)
    assert found["draft_default"]["method"] == "mtp" and found["draft_default"]["k"] == 2
    assert (found["weights"], found["prefix_caching"]) == ("real", False)
    props = {
        "model_ftype": "Q4_1",
        "total_slots": 1,
        "build_info": "b1",
        "default_generation_settings": {"n_ctx": 768},
    }
    theirs = ENGINES["llamacpp"].effective(
        {"/v1/models": MODELS, "/props": props}, "", server_settings("llamacpp", scenario())
    )
    assert (theirs["quantization"], theirs["max_model_len"]) == ("Q4_1", 768)
    assert theirs["versions"] == {"llama.cpp": "b1"}


def test_the_shape_is_the_one_of_the_engine() -> None:
    folder = ROOT / "scenarios" / "shapes" / "qwen35-35b-a3b"
    ours, shape = KNOWN_SHAPES["qwen35-35b-a3b"], read_config(folder)
    assert shape == ours
    settings = {"model": "qwen35-35b-a3b", "path": None, "weights": "random:1"}
    assert vocabulary_size(settings) == ours.vocab_size
    assert vocabulary_size(settings | {"weights": "auto"}) is None


def test_a_nonce_is_only_what_stands_behind_the_mark() -> None:
    assert nonce_of("m--run-1a") == "1a"
    assert nonce_of("m") == "" and nonce_of("--run-1a") == ""


def test_an_endpoint_is_never_started() -> None:
    with pytest.raises(UsageError, match="a server that you run") as caught:
        command("endpoint")
    assert "--endpoint endpoint=" in (caught.value.hint or "")


def test_every_arm_says_how_it_is_measured() -> None:
    for arm in ARMS.values():
        engine = ENGINES[arm.engine]
        assert engine.per_request and engine.restart and engine.tokens
        assert bool(engine.differs) is arm.peer
