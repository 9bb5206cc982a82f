"""What an engine says of itself: effective settings and running totals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .ops.linear.packed import fallbacks
from .output import RequestStats
from .state import bytes_per_sequence

if TYPE_CHECKING:
    from .engine import Engine


def settings_of(engine: Engine) -> dict[str, Any]:
    """The engine's part of ``/v1/settings``, as in effect now."""
    weights = engine.model.weights
    dtype = torch.float32 if weights.embed.device.type == "cpu" else weights.embed.dtype
    draft = engine.default_draft
    methods = ["none", "ngram"] + (["mtp"] if engine.drafter is not None else [])
    cuda = weights.embed.is_cuda
    return {
        "schema_version": 1,
        "profile": engine.profile,
        "model": engine.model_name,
        "weights": engine.weights,
        "dtype": str(dtype).removeprefix("torch."),
        "device": weights.embed.device.type,
        "device_name": torch.cuda.get_device_name() if cuda else None,
        "threads": engine._threads or torch.get_num_threads(),
        "graph_mode": "eager",
        "kernel_fallbacks": fallbacks(),
        "host_launch_us": None,
        "max_model_len": engine.max_model_len,
        "max_sequences": engine.max_sequences,
        "draft_default": {
            "method": draft.method,
            "k": draft.k,
            "head_rows": draft.head_rows,
            "acceptance": draft.acceptance,
        },
        "draft_methods": methods,
        "draft_refused": {} if "mtp" in methods else {"mtp": _why_no_mtp(weights.missing_mtp)},
        "state_bytes_per_sequence": bytes_per_sequence(
            engine.config, engine.max_model_len, engine.model.state.k.dtype
        ),
    }


def _why_no_mtp(missing: list[str]) -> str:
    return f"tensor {missing[0]} is missing" if missing else "the model has no MTP module"


def merged(a: RequestStats, b: RequestStats) -> RequestStats:
    """Draft counts of both, position by position; token counts are not summed."""
    size = max(len(a.accepted_per_pos), len(b.accepted_per_pos))
    pairs = [s.accepted_per_pos + [0] * (size - len(s.accepted_per_pos)) for s in (a, b)]
    return RequestStats(
        prompt_tokens=0,
        completion_tokens=0,
        drafts=a.drafts + b.drafts,
        draft_tokens=a.draft_tokens + b.draft_tokens,
        accepted_tokens=a.accepted_tokens + b.accepted_tokens,
        accepted_per_pos=[x + y for x, y in zip(*pairs, strict=True)],
    )


def add_up(parts: list[RequestStats]) -> dict[str, float | list[float]]:
    """The four speculative counters over all ``parts``."""
    total = RequestStats(0, 0)
    for part in parts:
        total = merged(total, part)
    return {
        "spec_decode_num_drafts": float(total.drafts),
        "spec_decode_num_draft_tokens": float(total.draft_tokens),
        "spec_decode_num_accepted_tokens": float(total.accepted_tokens),
        "spec_decode_num_accepted_tokens_per_pos": [float(x) for x in total.accepted_per_pos],
    }
