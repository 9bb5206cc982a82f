"""vLLM's OpenAI server. Flags and answers as of 0.26; the tests hold the list of flags used."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finalbench.arms.engine import (
    Address,
    Engine,
    Pages,
    Settings,
    draft_default,
    nonce_of,
    without_draft,
)
from finalbench.arms.shapes import model_folder, served_model

_CONFIG = "Initializing a V1 LLM engine"
_VERSION = re.compile(r"V1 LLM engine \(v([^)]+)\)")
_GRAPHS = re.compile(r"'cudagraph_mode': <CUDAGraphMode\.(\w+)")
_DRAFTS = re.compile(r"num_spec_tokens=(\d+)")
_METHOD = re.compile(r"SpeculativeConfig\(method='(\w+)'")
_MEMORY_SHARE = "0.88"


def serve(executable: Sequence[str], settings: Settings, address: Address) -> list[str]:
    """`vllm serve MODEL ...`, without the model's sampling defaults.

    Its prefix cache is off, except for cells that are about it.
    """
    folder = model_folder(settings)
    command = [*executable, "serve", folder, "--served-model-name", address.name]
    command += ["--host", address.host, "--port", str(address.port)]
    command += ["--dtype", str(settings["dtype"])]
    command += ["--max-model-len", str(settings["max_model_len"])]
    command += ["--max-num-seqs", str(settings["max_sequences"])]
    cache = "enable" if settings.get("prefix_cache") == "on" else "no-enable"
    command += [f"--{cache}-prefix-caching", "--generation-config", "vllm", "--seed", "0"]
    command += ["--language-model-only"]
    if settings["device"] == "cuda":
        command += ["--gpu-memory-utilization", _MEMORY_SHARE]
    if str(settings["weights"]).startswith("random"):
        command += ["--load-format", "dummy"]
    if not (Path(folder) / "tokenizer.json").is_file() and Path(folder).is_dir():
        command += ["--skip-tokenizer-init"]  # ids in, ids out
    drafts = _speculative(settings)
    if drafts is not None:
        command += ["--speculative-config", json.dumps(drafts, separators=(",", ":"))]
    return command


def _speculative(settings: Settings) -> dict[str, Any] | None:
    """Its synthetic rates are by position and unconditional; ours is given the one before."""
    if settings.get("draft_method") in (None, "none"):
        return None
    k = int(settings["draft_k"] or 0)
    found: dict[str, Any] = {"method": settings["draft_method"], "num_speculative_tokens": k}
    chance = settings.get("draft_acceptance")
    if chance is not None:
        rates = [round(float(str(chance)) ** place, 6) for place in range(1, k + 1)]
        found |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return found


def effective(pages: Pages, log: str, settings: Settings) -> dict[str, Any]:
    """From `/v1/models`, `/version`, and the engine's own start line in the log."""
    models = (pages.get("/v1/models") or {}).get("data") or [{}]
    line = next((text for text in log.splitlines() if _CONFIG in text), "")
    found: dict[str, Any] = {
        "profile": "vllm",
        "model": served_model(settings),
        "nonce": nonce_of(str(models[0].get("id", ""))),
        "max_model_len": models[0].get("max_model_len"),
        "draft_default": draft_default(settings),
        "read_from": ["/v1/models", "/version"] + (["log"] if line else []),
        "versions": {"vllm": (pages.get("/version") or {}).get("version")},
    }
    if not line:
        return found
    if (stated := _VERSION.search(line)) is not None:
        found["versions"] = {"vllm": stated[1]}
    dummy = _field(line, "load_format") == "dummy"
    found |= {
        "weights": "random" if dummy else "real",
        "dtype": (_field(line, "dtype") or "").removeprefix("torch.") or None,
        "device": (_field(line, "device_config") or "").split(":")[0] or None,
        "quantization": _field(line, "quantization"),
        "enforce_eager": _field(line, "enforce_eager"),
        "kv_cache_dtype": _field(line, "kv_cache_dtype"),
        "prefix_caching": _field(line, "enable_prefix_caching"),
    }
    if dummy:
        found["weights_from"] = "the server's own dummy initialisation"
    if (mode := _GRAPHS.search(line)) is not None:
        found["graph_mode"] = mode[1].lower()
    method, k = _METHOD.search(line), _DRAFTS.search(line)
    found["draft_default"] |= {
        # Older names such as qwen3_5_mtp mean the same.
        "method": "mtp" if method and "mtp" in method[1] else method[1] if method else "none",
        "k": int(k[1]) if k else 0,
    }
    return found


def _field(line: str, name: str) -> str | None:
    match = re.search(rf"[ (,]{name}=([^,]*),", line)
    value = match[1].strip("'\"") if match else None
    return None if value in (None, "None") else value


VLLM = Engine(
    name="vllm",
    title="vLLM",
    variable="FINALBENCH_VLLM",
    commands=("vllm",),
    hint="pip install vllm, name its command in FINALBENCH_VLLM, or use --endpoint vllm=URL",
    serve=serve,
    pages=("/v1/models", "/version"),
    effective=effective,
    body=without_draft,
    counters="window",
    tokens="token ids in each chunk (return_token_ids)",
    synthetic_drafts=True,
    prefix_cache="restart",
    environment={"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "NO_COLOR": "1"},
    environment_prefix="VLLM_",
    per_request=("sampling", "seed", "output length"),
    restart=("weights", "dtype", "drafts and their depth", "synthetic acceptance", "context"),
    differs=(
        "drafts are fixed when the server starts: one process for each draft setting",
        "draft counters are read from /metrics before and after a cell, not from each request",
        "settings are read from its log and /v1/models, it has no /v1/settings",
        "sampled tokens come from another random stream: equal seeds give other tokens than VK",
        "random weights are its own dummy initialisation, uniform within 0.001: other routing",
        "prompt lookup (ngram) is not compared: its rules are others than VK's",
    ),
)
