"""Checkpoints: both name styles, tied heads, expert layouts, and every way to be broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from qwen import VOCAB, checkpoint, engine, generate, prompt
from safetensors.torch import load_file, save_file
from vkengine.checkpoint import CheckpointError
from vkengine.config import KNOWN_SHAPES, ConfigError, parse_config
from vkengine.engine import load_engine
from vkengine.load import resolve_config
from vkengine.sampling import Draft, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
FILE = "model.safetensors"


def broken(tmp_path: Path, change, moe: bool = True) -> Path:
    """A copy of the tiny checkpoint after ``change(tensors)``."""
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint(moe=moe), folder)
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)
    return folder


def refused(folder: Path, *parts: str, **more: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_engine(str(folder), max_model_len=128, **more)
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_name_styles_and_expert_layouts_give_the_same_tokens() -> None:
    ids = prompt(20)
    want = generate(engine(), ids, GREEDY)
    for shape in ({"style": "model.language_model."}, {"per_expert": True}):
        assert generate(engine(**shape), ids, GREEDY) == want, shape


def test_sharded_index(tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    shutil.copytree(checkpoint(), folder)
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({n: tensors[n] for n in own}, folder / file)
    index = {"weight_map": {n: f for f, own in parts.items() for n in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    ids = prompt(20)
    eng = load_engine(str(folder), max_model_len=128)
    assert generate(eng, ids, GREEDY) == generate(engine(), ids, GREEDY)
    (folder / "b.safetensors").unlink()
    refused(folder, "b.safetensors", "no such file")


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.linear_attn.A_log",
        "model.layers.2.linear_attn.in_proj_b.weight",
        "model.layers.3.self_attn.q_norm.weight",
        "model.layers.1.mlp.experts.down_proj",
        "model.layers.1.mlp.shared_expert_gate.weight",
        "model.norm.weight",
    ],
)
def test_missing_or_misshapen_tensor_is_named(tmp_path: Path, name: str) -> None:
    folder = broken(tmp_path, lambda t: t.pop(name))
    refused(folder, name, "missing")
    shutil.rmtree(folder)
    folder = broken(tmp_path, lambda t: t.update({name: torch.zeros(3, 5)}))
    refused(folder, name, "[3, 5]", FILE)


def test_unexpected_tensor_is_named(tmp_path: Path) -> None:
    extra = "model.layers.0.mlp.gate_proj.weight_scale_inv"
    folder = broken(tmp_path, lambda t: t.update({extra: torch.zeros(1)}))
    refused(folder, extra, "unexpected", FILE)


def test_integer_tensor_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    folder = broken(tmp_path, lambda t: t.update({name: t[name].to(torch.int8)}))
    refused(folder, name, "int8")


def test_truncated_file(tmp_path: Path) -> None:
    folder = broken(tmp_path, lambda t: None)
    data = (folder / FILE).read_bytes()
    for size in (len(data) - 5, 100, 4, 0):
        (folder / FILE).write_bytes(data[:size])
        refused(folder, FILE, "truncated")
    (folder / FILE).unlink()
    refused(folder, "no *.safetensors")


@pytest.mark.parametrize("name", ["mtp.fc.weight", "mtp.layers.0.self_attn.k_norm.weight"])
def test_any_missing_mtp_tensor_refuses_drafting(tmp_path: Path, name: str) -> None:
    """E17: whether drafts can be had is known at the start."""
    folder = broken(tmp_path, lambda t: t.pop(name))
    refused(folder, name, default_draft=Draft("mtp", 2))
    eng = load_engine(str(folder), max_model_len=128)
    assert generate(eng, prompt(20), GREEDY) == generate(engine(), prompt(20), GREEDY)
    params = SamplingParams(draft=Draft("mtp", 1))
    with pytest.raises(ValueError, match=f"draft.method.*{name}"):
        eng.add("r", [1, 2], params)
    assert "mtp" not in eng.settings()["draft_methods"]


def test_e84_the_mtp_layers_kind_must_match(tmp_path: Path) -> None:
    """A dense feed-forward in the MTP layer of a MoE model is not taken for the real one."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("mtp.layers.0.mlp.")]:
            del tensors[name]
        tensors["mtp.layers.0.mlp.gate_proj.weight"] = torch.zeros(32, 64)

    refused(broken(tmp_path, change), "mtp.layers.0.mlp.gate_proj.weight")


def test_unknown_names_and_settings() -> None:
    for model in ("no-such-model", "qwen35-35b-a3b"):
        with pytest.raises(CheckpointError, match=model):
            load_engine(model, device="cpu")
    with pytest.raises(CheckpointError, match="random:x"):
        load_engine(str(checkpoint()), weights="random:x")
    with pytest.raises(CheckpointError, match="float32"):
        load_engine(str(checkpoint()), device="cpu", dtype="bfloat16")


def test_random_weights_are_a_function_of_the_seed() -> None:
    def first(seed: int) -> list[int]:
        eng = load_engine(str(checkpoint()), weights=f"random:{seed}", max_model_len=128)
        assert eng.settings()["weights"] == f"random:{seed}"
        tokens = generate(eng, prompt(9), GREEDY)
        drafted = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, draft=Draft("mtp", 2)
        )
        assert generate(eng, prompt(9), drafted) == tokens
        return tokens

    assert first(1) == first(1) != first(2)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"layer_types": ["mamba"] * 4}, "mamba"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_configs_that_are_refused(change: dict, field: str) -> None:
    raw = json.loads((checkpoint() / "config.json").read_text())
    raw |= change
    if change.get("hidden_size", 1) is None:
        del raw["hidden_size"]
    with pytest.raises(ConfigError, match=field):
        parse_config(raw, "x")


def test_known_shapes_have_the_published_sizes() -> None:
    """Parameters of the text model, derived from the shape, against models.md 1.3."""

    def billions(name: str) -> float:
        c = KNOWN_SHAPES[name]
        h = c.hidden_size
        gdn = (c.conv_dim + c.value_size + 2 * c.gdn_value_heads) * h + c.value_size * h
        attention = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim * h
        attention += c.num_heads * c.head_dim * h
        ffn = 3 * h * c.intermediate_size
        if c.is_moe:
            ffn = 3 * h * (c.num_experts * c.expert_size + c.shared_expert_size)
            ffn += (c.num_experts + 1) * h
        total = c.gdn_layers * gdn + c.attention_layers * attention + c.num_layers * ffn
        return (total + c.vocab_size * h * (1 if c.tied else 2)) / 1e9

    for name, want in {
        "qwen35-35b-a3b": 34.661,
        "qwen36-27b": 26.896,
        "qwen35-397b-a17b": 396.346,
        "qwen35-122b-a10b": 122.112,
        "qwen35-9b": 8.954,
        "qwen35-4b": 4.206,
        "qwen35-2b": 1.882,
        "qwen35-0.8b": 0.752,
    }.items():
        assert billions(name) == pytest.approx(want, rel=2e-3), name
    assert resolve_config("darwin-36b-opus").hidden_size == 2048
    assert VOCAB == 512
