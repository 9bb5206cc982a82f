"""SGLang's OpenAI server. The tests hold the list of flags used."""

from __future__ import annotations

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

_MEMORY_SHARE = "0.85"


def serve(executable: Sequence[str], settings: Settings, address: Address) -> list[str]:
    """`python -m sglang.launch_server ...`, without its prefix tree where no cell is about it."""
    folder = model_folder(settings)
    command = [*executable, "--model-path", folder, "--served-model-name", address.name]
    command += ["--host", address.host, "--port", str(address.port)]
    command += ["--dtype", str(settings["dtype"])]
    command += ["--context-length", str(settings["max_model_len"])]
    command += ["--max-running-requests", str(settings["max_sequences"])]
    command += ["--random-seed", "0", "--enable-metrics"]
    if settings.get("prefix_cache") != "on":
        command += ["--disable-radix-cache"]
    command += ["--sampling-defaults", "openai"]
    if settings["device"] in ("cpu", "cuda"):
        command += ["--device", str(settings["device"])]
    if settings["device"] == "cuda":
        command += ["--mem-fraction-static", _MEMORY_SHARE]
    if str(settings["weights"]).startswith("random"):
        command += ["--load-format", "dummy"]
    if Path(folder).is_dir() and not (Path(folder) / "tokenizer.json").is_file():
        command += ["--skip-tokenizer-init"]
    if settings.get("draft_method") not in (None, "none"):
        k = int(settings["draft_k"] or 0)
        command += ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", str(k)]
        command += ["--speculative-eagle-topk", "1"]
        command += ["--speculative-num-draft-tokens", str(k + 1)]
    return command


def effective(pages: Pages, log: str, settings: Settings) -> dict[str, Any]:
    """From `/server_info`: its arguments as it resolved them."""
    info = pages.get("/server_info") or pages.get("/get_server_info") or {}
    models = (pages.get("/v1/models") or {}).get("data") or [{}]
    steps = info.get("speculative_num_steps")
    drafts = info.get("speculative_algorithm") is not None
    found: dict[str, Any] = {
        "profile": "sglang",
        "model": served_model(settings),
        "nonce": nonce_of(str(models[0].get("id", ""))),
        "max_model_len": models[0].get("max_model_len"),
        "draft_default": draft_default(settings),
        "read_from": ["/v1/models"],
        "versions": {"sglang": info.get("version")},
    }
    if not info:
        return found
    dummy = info.get("load_format") == "dummy"
    return (
        found
        | {
            "weights": "random" if dummy else "real",
            "dtype": info.get("dtype"),
            "device": info.get("device"),
            "quantization": info.get("quantization"),
            "kv_cache_dtype": info.get("kv_cache_dtype"),
            "prefix_caching": not info.get("disable_radix_cache", False),
            "graph_mode": "none" if info.get("disable_cuda_graph") else "cuda_graph",
            "draft_default": draft_default(settings)
            | {"method": "mtp" if drafts else "none", "k": int(steps or 0) if drafts else 0},
            "read_from": ["/v1/models", "/server_info"],
        }
        | ({"weights_from": "the server's own dummy initialisation"} if dummy else {})
    )


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    variable="FINALBENCH_SGLANG",
    commands=("sglang", "serve"),
    hint="pip install sglang, name its command in FINALBENCH_SGLANG, or use --endpoint sglang=URL",
    serve=serve,
    pages=("/v1/models", "/server_info", "/get_server_info"),
    effective=effective,
    body=without_draft,
    counters="window",
    tokens="token ids in each chunk (return_token_ids)",
    counter_names={"cached_tokens": "prefix_cache_hits"},
    prefix_cache="restart",
    flush="/flush_cache",
    environment={"DO_NOT_TRACK": "1", "NO_COLOR": "1"},
    environment_prefix="SGLANG_",
    per_request=("sampling", "seed", "output length"),
    restart=("weights", "dtype", "drafts and their depth", "context"),
    differs=(
        "drafts are fixed when the server starts: one process for each draft setting",
        "it cannot draft with a synthetic acceptance: such cells are not served by it",
        "settings are read from /server_info, it has no /v1/settings",
        "random weights are its own dummy initialisation: other routing",
    ),
)
