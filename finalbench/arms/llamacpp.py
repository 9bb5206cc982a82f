"""llama.cpp's `llama-server` over a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finalbench.arms.engine import (
    Address,
    Engine,
    Pages,
    Settings,
    draft_default,
    model_argument,
    nonce_of,
    without_draft,
)
from finalbench.arms.shapes import served_model

_WINDOW = 32768  # penalties look at the whole context, as in the other servers


def serve(executable: Sequence[str], settings: Settings, address: Address) -> list[str]:
    """`llama-server -m FILE ...`; each sequence has the whole context, nothing is reused."""
    sequences = int(settings["max_sequences"] or 1)
    context = int(settings["max_model_len"] or 0) * sequences
    command = [*executable, "--model", model_argument(settings), "--alias", address.name]
    command += ["--host", address.host, "--port", str(address.port)]
    command += ["--parallel", str(sequences), "--ctx-size", str(context)]
    command += ["--no-context-shift", "--cache-ram", "0", "--metrics", "--no-webui", "--offline"]
    if settings["threads"] is not None:
        command += ["--threads", str(settings["threads"])]
        command += ["--threads-batch", str(settings["threads"])]
    if settings["device"] == "cpu":
        command += ["--n-gpu-layers", "0"]
    return command


def effective(pages: Pages, log: str, settings: Settings) -> dict[str, Any]:
    """From `/props`: file type, context and slots; where the layers lie is in the log."""
    props = pages.get("/props") or {}
    models = (pages.get("/v1/models") or {}).get("data") or [{}]
    sampling = props.get("default_generation_settings") or {}
    return {
        "profile": "llamacpp",
        "model": served_model(settings),
        "nonce": nonce_of(str(models[0].get("id", ""))),
        "weights": "real",
        "quantization": props.get("model_ftype"),
        "dtype": settings["dtype"] if props else None,
        "max_model_len": sampling.get("n_ctx"),
        "max_sequences": props.get("total_slots"),
        "threads": settings["threads"],
        "device": settings["device"],
        "draft_default": draft_default(settings),
        "prefix_caching": False,  # every request says so (`body`)
        "read_from": ["/v1/models", "/props"],
        "versions": {"llama.cpp": props.get("build_info")},
    }


def body(asked: dict[str, Any]) -> dict[str, Any]:
    """Its own names: `repeat_penalty`; no prompt reuse; a running token count in each chunk."""
    said = without_draft(asked)
    said["repeat_penalty"] = said.pop("repetition_penalty", 1.0)
    neutral = said["repeat_penalty"] == 1.0 and not any(
        said.get(name) for name in ("presence_penalty", "frequency_penalty")
    )
    if not neutral:
        said["repeat_last_n"] = _WINDOW
    return said | {"cache_prompt": False, "timings_per_token": True}


LLAMACPP = Engine(
    name="llamacpp",
    title="llama.cpp",
    variable="FINALBENCH_LLAMACPP",
    commands=("llama-server",),
    hint="build llama.cpp, name its llama-server in FINALBENCH_LLAMACPP, or use --endpoint",
    serve=serve,
    pages=("/v1/models", "/props"),
    effective=effective,
    body=body,
    counters="window",
    tokens="the running count in each chunk (timings.predicted_n), checked against usage",
    tokenize_field="content",
    counter_names={
        "tokens_predicted": "generation_tokens",
        "prompt_tokens_cached": "prefix_cache_hits",
    },
    environment_prefix="LLAMA_",
    per_request=("sampling", "seed", "output length"),
    restart=("weights", "context", "threads", "device"),
    differs=(
        "serves GGUF files: another quantisation than a checkpoint's",
        "no token ids in its stream, so its outputs are not compared token for token",
        "a token that ends inside a character is sent with the next one",
        "its own drafts (a draft model, prompt lookup) are not used",
    ),
)
