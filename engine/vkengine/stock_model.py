"""Loads a checkpoint, or random weights of its shape, into transformers for the stock profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from .checkpoint import CheckpointError, random_source
from .digest import checkpoint_folder
from .load import DEFAULT_MAX_LEN, resolve_config
from .stock import StockEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .config import ModelConfig

_LAYER_TYPES = {"gdn": "linear_attention", "attention": "full_attention"}


class StockLoadError(ValueError):
    """The checkpoint cannot be served as it is; names the file or tensor."""


def load_stock(
    model: str,
    *,
    weights: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    max_model_len: int | None = None,
    compiled: bool = False,
) -> StockEngine:
    """`weights` is auto or random:SEED. Raises StockLoadError."""
    if threads is not None:
        torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    place = _device(device)
    number = _dtype(dtype, place)
    folder = checkpoint_folder(model)
    if weights != "auto":
        loaded = _random(model, folder, weights, place, number)
    elif folder is None:
        raise StockLoadError(f"no checkpoint '{model}': give a folder with config.json")
    else:
        loaded = _read(folder, place, number)
    text = loaded.config.get_text_config(decoder=True)
    longest = int(getattr(text, "max_position_embeddings", None) or DEFAULT_MAX_LEN)
    return StockEngine(
        loaded,
        model_name=Path(model).name,
        eos_token_ids=_eos(folder, loaded.config),
        max_model_len=min(max_model_len or DEFAULT_MAX_LEN, longest),
        weights="real" if weights == "auto" else weights,
        threads=threads,
        compiled=compiled,
    )


def _device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise StockLoadError("no CUDA device on this machine")
    return torch.device(device)


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, dtype)


def _read(folder: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    _check_files(folder)
    try:
        # Wrong shapes are let through here and refused by name below.
        result: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise StockLoadError(f"checkpoint {folder.name}: {first}") from error
    loaded, info = result
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise StockLoadError(
            f"checkpoint {folder.name}: tensor {name} has shape {list(found)}, "
            f"the config wants {list(wanted)}"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise StockLoadError(f"checkpoint {folder.name}: tensor {missing[0]} is missing")
    return loaded.to(device)


def _check_files(folder: Path) -> None:
    """A truncated or absent file is named here; transformers would say much less."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise StockLoadError(f"checkpoint {folder.name}: no safetensors file")
    for name in names:
        path = folder / name
        if not path.is_file():
            raise StockLoadError(f"checkpoint {folder.name}: {name} is missing")
        with path.open("rb") as file:
            head = file.read(8)
            length = int.from_bytes(head, "little")
            header = file.read(length) if length < 1 << 27 else b""
        try:
            tensors = json.loads(header)
            end = max(t["data_offsets"][1] for n, t in tensors.items() if n != "__metadata__")
        except (ValueError, KeyError, TypeError):
            raise StockLoadError(f"checkpoint {folder.name}: {name} is truncated") from None
        if path.stat().st_size != 8 + length + end:
            raise StockLoadError(f"checkpoint {folder.name}: {name} is truncated")


@torch.no_grad()
def _random(
    model: str, folder: Path | None, weights: str, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """The engine's own random weights under transformers' names: both arms hold the same."""
    kind, _, seed = weights.partition(":")
    if kind != "random" or not seed.isdecimal():
        raise StockLoadError(f"weights '{weights}': must be auto or random:SEED")
    try:
        shape = resolve_config(model)
    except CheckpointError as error:
        raise StockLoadError(str(error)) from error
    config = text_config(shape) if folder is None else AutoConfig.from_pretrained(folder)
    with no_init_weights(), torch.device(device):
        built = AutoModelForCausalLM.from_config(config, dtype=dtype)
    draw = random_source(shape, int(seed), device, dtype)
    for name, parameter in built.named_parameters():
        parameter.copy_(draw(name, tuple(parameter.shape)))
    built.tie_weights()
    return built


def text_config(shape: ModelConfig) -> PreTrainedConfig:
    """A known shape as transformers describes it."""
    fields: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "layer_types": [_LAYER_TYPES[kind] for kind in shape.layer_types],
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
        },
        "linear_num_key_heads": shape.gdn_key_heads,
        "linear_num_value_heads": shape.gdn_value_heads,
        "linear_key_head_dim": shape.gdn_key_dim,
        "linear_value_head_dim": shape.gdn_value_dim,
        "linear_conv_kernel_dim": shape.conv_width,
        "rms_norm_eps": shape.rms_eps,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": shape.max_positions,
        "eos_token_id": list(shape.eos_token_ids),
    }
    if not shape.is_moe:
        return Qwen3_5TextConfig(**fields, intermediate_size=shape.intermediate_size)
    return Qwen3_5MoeTextConfig(
        **fields,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.experts_per_token,
        moe_intermediate_size=shape.expert_size,
        shared_expert_intermediate_size=shape.shared_expert_size,
    )


def _eos(folder: Path | None, config: Any) -> frozenset[int]:
    """generation_config.json, else the model's config."""
    value = None
    if folder is not None and (folder / "generation_config.json").is_file():
        text = (folder / "generation_config.json").read_text("utf-8")
        value = json.loads(text).get("eos_token_id")
    if value is None:
        value = getattr(config.get_text_config(decoder=True), "eos_token_id", None)
    if value is None:
        value = getattr(config, "eos_token_id", None)
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
