"""Bringing an engine up: where the weights come from, on what device, in which type."""

from __future__ import annotations

import torch

from .checkpoint import CheckpointError, load_model, random_model
from .config import KNOWN_SHAPES, ConfigError, ModelConfig, read_config
from .digest import checkpoint_folder
from .draft.mtp import MtpDrafter
from .engine import Engine
from .models.layout import ModelWeights
from .models.prepare import prepare_cpu
from .rows import Workspace
from .sampling import Draft
from .state import State, cache_length
from .step import Model

DEFAULT_MAX_LEN = 4096
PROFILES = ("vkae", "vkue")


def _seed_of(weights: str) -> int | None:
    """The seed of ``random:SEED``, or None for ``auto``. Raises CheckpointError."""
    if weights == "auto":
        return None
    kind, _, seed = weights.partition(":")
    if kind != "random" or not seed.isdecimal():
        raise CheckpointError(f"weights: {weights!r} is neither 'auto' nor 'random:SEED'")
    return int(seed)


def resolve_config(model: str) -> ModelConfig:
    """The shape a folder, a bundled name or a known big name stands for. Raises CheckpointError."""
    folder = checkpoint_folder(model)
    try:
        if folder is not None:
            return read_config(folder)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if model not in KNOWN_SHAPES:
        raise CheckpointError(
            f"{model}: neither a folder with a config.json nor a known name "
            f"({', '.join(sorted(KNOWN_SHAPES))})"
        )
    return KNOWN_SHAPES[model]


def _weights(
    model: str, config: ModelConfig, seed: int | None, device: torch.device,
    dtype: torch.dtype, positions: int,
) -> ModelWeights:  # fmt: skip
    if seed is not None:
        return random_model(config, seed, device, dtype, positions, mtp=config.mtp_layers > 0)
    folder = checkpoint_folder(model)
    if folder is None:
        raise CheckpointError(
            f"{model}: no checkpoint on this machine; give its folder, or ask for random "
            "weights of its shape with random:SEED"
        )
    return load_model(folder, config, device, dtype, positions)


def load_engine(
    model: str,
    *,
    profile: str = "vkae",
    weights: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    max_model_len: int | None = None,
    max_sequences: int = 8,
    default_draft: Draft | None = None,
) -> Engine:
    """Load ``model`` (a folder or a known name) and return an engine ready for requests.

    Raises CheckpointError naming file and tensor, or what the machine lacks.
    """
    draft = default_draft or Draft()
    if profile not in PROFILES:
        raise CheckpointError(f"profile: {profile!r} is none of {', '.join(PROFILES)}")
    seed = _seed_of(weights)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("device: no CUDA GPU is visible here")
    where = torch.device(device)
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if device == "cpu" and dtype != "float32":
        raise CheckpointError("dtype: a CPU serves float32 only")
    if threads is not None:
        torch.set_num_threads(threads)
    config = resolve_config(model)
    max_len = min(max_model_len or DEFAULT_MAX_LEN, config.max_positions)
    kind = getattr(torch, dtype)
    if device == "cuda":
        from .gpu_load import load_cuda_engine

        return load_cuda_engine(
            config, lambda positions: _weights(model, config, seed, where, kind, positions),
            profile=profile, weights="real" if seed is None else weights, max_len=max_len,
            max_sequences=max_sequences, default_draft=draft,
        )  # fmt: skip
    with torch.inference_mode():
        parameters = _weights(model, config, seed, where, kind, cache_length(max_len))
        if draft.active and draft.method == "mtp" and parameters.mtp is None:
            missing = parameters.missing_mtp
            what = f"tensor {missing[0]} is missing" if missing else "the model has no MTP module"
            raise CheckpointError(f"{model}: cannot draft with mtp: {what}")
        state = State(config, max_sequences, max_len, where, kind, mtp=parameters.mtp is not None)
        drafter = None
        if parameters.mtp is not None and state.mtp is not None:
            drafter = MtpDrafter(parameters, state.mtp)
        prepare_cpu(parameters)
    return Engine(
        Model(parameters, state, Workspace(where)),
        profile=profile,
        weights="real" if seed is None else weights,
        default_draft=draft,
        drafter=drafter,
        threads=threads,
    )
