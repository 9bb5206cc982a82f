"""Random Qwen3.5 checkpoints written by transformers itself, with an MTP module of our own."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 2048,
    "eos_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


def text_config(moe: bool, tied: bool) -> Any:
    """transformers' own configuration of the tiny shape."""
    from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    if moe:
        return Qwen3_5MoeTextConfig(
            **_COMMON,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=2,
            tie_word_embeddings=tied,
        )
    return Qwen3_5TextConfig(**_COMMON, intermediate_size=96, tie_word_embeddings=tied)


def scramble(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Values that exercise every term: sharp enough logits, gains off 1, decays of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name in sorted(tensors):
        shape = tensors[name].shape
        x = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            x = torch.rand(shape, generator=generator) * 2.5
        elif name.endswith("dt_bias"):
            x = x - 3.0
        elif name.endswith("linear_attn.norm.weight"):
            x = 1.0 + 0.2 * x
        elif x.ndim == 1:
            x = 0.2 * x
        elif name.endswith("conv1d.weight"):
            x = 0.3 * x
            x[..., -1] += 1.0  # keys of ordinary length: normalising tiny ones amplifies rounding
        else:
            x = x * shape[-1] ** -0.5
        result[name] = x
    return result


def mtp_shapes(moe: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the MTP module, written out from the published layout."""
    at = "mtp.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (64, 128),
        "mtp.pre_fc_norm_embedding.weight": (64,),
        "mtp.pre_fc_norm_hidden.weight": (64,),
        "mtp.norm.weight": (64,),
        f"{at}input_layernorm.weight": (64,),
        f"{at}post_attention_layernorm.weight": (64,),
        f"{at}self_attn.q_proj.weight": (256, 64),
        f"{at}self_attn.k_proj.weight": (64, 64),
        f"{at}self_attn.v_proj.weight": (64, 64),
        f"{at}self_attn.o_proj.weight": (64, 128),
        f"{at}self_attn.q_norm.weight": (32,),
        f"{at}self_attn.k_norm.weight": (32,),
    }
    if not moe:
        for name, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
            shapes[f"{at}mlp.{name}_proj.weight"] = shape
        return shapes
    shapes[f"{at}mlp.gate.weight"] = (8, 64)
    shapes[f"{at}mlp.shared_expert_gate.weight"] = (1, 64)
    for name, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
        shapes[f"{at}mlp.shared_expert.{name}_proj.weight"] = shape
    shapes[f"{at}mlp.experts.gate_up_proj"] = (8, 64, 64)
    shapes[f"{at}mlp.experts.down_proj"] = (8, 64, 32)
    return shapes


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fused expert stacks as one tensor per expert and projection."""
    result = {}
    for name, x in tensors.items():
        at, _, kind = name.rpartition(".")
        for e in range(x.shape[0]):
            if kind == "gate_up_proj":
                gate, up = x[e].chunk(2)
                result[f"{at}.{e}.gate_proj.weight"] = gate.contiguous()
                result[f"{at}.{e}.up_proj.weight"] = up.contiguous()
            elif kind == "down_proj":
                result[f"{at}.{e}.down_proj.weight"] = x[e].contiguous()
            else:
                result[name] = x
                break
    return result


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="vk-qwen-")


@functools.cache
def checkpoint(
    *, moe: bool = True, tied: bool = False, style: str = "model.", per_expert: bool = False
) -> Path:
    """A folder with config.json and model.safetensors; do not write into it."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

    name = f"{'moe' if moe else 'dense'}-{tied}-{style}{per_expert}"
    folder = Path(_root().name) / name
    folder.mkdir(exist_ok=True)
    config = text_config(moe, tied)
    model = (Qwen3_5MoeForCausalLM if moe else Qwen3_5ForCausalLM)(config)
    config.save_pretrained(folder)
    tensors = dict(model.state_dict())
    if tied:
        del tensors["lm_head.weight"]
    tensors |= {n: torch.empty(s) for n, s in mtp_shapes(moe).items()}
    tensors = scramble(tensors, seed=7)
    if per_expert:
        tensors = split_experts(tensors)
    if style != "model.":
        tensors = {
            (style + n.removeprefix("model.") if n.startswith("model.") else n): x
            for n, x in tensors.items()
        }
        tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["mtp_num_hidden_layers"] = 1
    if style != "model.":
        outer = {"model_type": raw["model_type"].removesuffix("_text"), "text_config": raw}
        raw = outer | {"tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@functools.cache
def reference(*, moe: bool = True, tied: bool = False) -> Any:
    """transformers' model over the same weights, eager, fp32."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

    folder = checkpoint(moe=moe, tied=tied)
    model = (Qwen3_5MoeForCausalLM if moe else Qwen3_5ForCausalLM)(text_config(moe, tied))
    model.config._attn_implementation = "eager"
    tensors = load_file(folder / "model.safetensors")
    wanted = {n: x for n, x in tensors.items() if not n.startswith("mtp.")}
    missing, unexpected = model.load_state_dict(wanted, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids without the end token."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(1, VOCAB, (length,), generator=generator).tolist()


def engine(max_sequences: int = 8, max_len: int = 512, **shape: Any) -> Any:
    """A fresh engine over :func:`checkpoint`."""
    from vkengine.engine import load_engine

    return load_engine(
        str(checkpoint(**shape)), max_model_len=max_len, max_sequences=max_sequences, threads=1
    )


def generate(eng: Any, ids: list[int], params: Any, request_id: str = "r") -> list[int]:
    """All tokens of one request, run to its end alone."""
    eng.add(request_id, ids, params)
    tokens: list[int] = []
    while eng.has_work():
        for output in eng.step():
            tokens += output.token_ids
            assert output.error is None, output.error
    return tokens
