"""Brings the engine up on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .checkpoint import CheckpointError
from .config import ModelConfig
from .gpu_engine import GpuEngine
from .gpu_flights import MAX_K
from .models.layout import ModelWeights
from .routing import distinct_experts
from .rows import Workspace
from .sampling import Draft
from .state import State, cache_length
from .step import Model


def load_cuda_engine(
    config: ModelConfig,
    weights_for: Callable[[int], ModelWeights],
    *,
    profile: str,
    weights: str,
    max_len: int,
    max_sequences: int,
    default_draft: Draft,
) -> GpuEngine:
    """Weights on the GPU, state for all slots, graphs for one stream at the usual depths."""
    device = torch.device("cuda")
    with torch.inference_mode():
        began = time.monotonic()
        parameters = weights_for(cache_length(max_len))
        torch.cuda.synchronize()
        weights_s = time.monotonic() - began
        if default_draft.active and default_draft.method == "mtp" and parameters.mtp is None:
            missing = parameters.missing_mtp
            what = f"tensor {missing[0]} is missing" if missing else "the model has no MTP module"
            raise CheckpointError(f"{config.name}: cannot draft with mtp: {what}")
        dtype = parameters.embed.dtype
        mtp = parameters.mtp is not None
        state = State(config, max_sequences, max_len, device, dtype, mtp=mtp)
        depths = {0}
        if default_draft.active and default_draft.k != "auto" and mtp:
            depths.add(min(int(default_draft.k), MAX_K))
        model = Model(parameters, state, Workspace(device))
        engine = GpuEngine(
            model,
            capture=tuple(sorted(depths)),
            profile=profile,
            weights=weights,
            default_draft=default_draft,
        )
        engine.load_s = {"weights": weights_s} | engine.load_s
        if config.num_experts and weights.startswith("random"):
            engine.routing = distinct_experts(model)
        return engine
