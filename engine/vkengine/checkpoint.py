"""Parameters from safetensors files, or random ones of the true shape.

Both checkpoint name styles are read (``model.language_model.*`` and ``model.*``), tied and untied
heads, and MTP experts fused or one by one. Every tensor of the text model must be there with its
shape, and nothing unknown may be; vision tensors (``model.visual.*``) are skipped knowingly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import ModelConfig
from .models.layout import (
    AttentionWeights,
    GdnWeights,
    HeadWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
)

SKIPPED_PREFIXES = ("model.visual.", "visual.")


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file and the tensor."""


@dataclass(slots=True)
class Files:
    """Which safetensors file holds which tensor, and which of them were read."""

    folder: Path
    where: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]
    used: set[str] = field(default_factory=set)

    @staticmethod
    def open(folder: Path) -> Files:
        """Read all headers of ``folder/*.safetensors``. Raises CheckpointError."""
        index = folder / "model.safetensors.index.json"
        paths = sorted(folder.glob("*.safetensors"))
        if index.is_file():
            try:
                listed = set(json.loads(index.read_text())["weight_map"].values())
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise CheckpointError(f"{index}: unreadable: {error}") from None
            for name in sorted(listed - {path.name for path in paths}):
                raise CheckpointError(f"{folder / name}: no such file (listed in {index.name})")
            paths = [path for path in paths if path.name in listed]
        if not paths:
            raise CheckpointError(f"{folder}: no *.safetensors file")
        files = Files(folder, {}, {})
        for path in paths:
            with _reading(path), safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    files.where[name] = path
                    files.shapes[name] = tuple(opened.get_slice(name).get_shape())
        return files

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, checked against ``shape``. Raises CheckpointError naming file and tensor."""
        path = self.where.get(name)
        if path is None:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing")
        if self.shapes[name] != shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(self.shapes[name])}, "
                f"the config asks for {list(shape)}"
            )
        self.used.add(name)
        with _reading(path), safe_open(path, framework="pt") as opened:
            tensor = opened.get_tensor(name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise CheckpointError(
                f"{path}: tensor {name} has dtype {tensor.dtype}; only float32, float16 and "
                "bfloat16 are served"
            )
        return tensor


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: unreadable or truncated: {error}") from None


#: name, shape -> tensor. The builder asks one for everything it needs.
Source = Callable[[str, tuple[int, ...]], Tensor]


@dataclass(slots=True)
class Builder:
    """Assembles merged weights from single tensors on ``device`` in ``dtype``."""

    config: ModelConfig
    source: Source
    device: torch.device
    dtype: torch.dtype
    cos: Tensor
    sin: Tensor
    per_expert: Callable[[str], bool] = field(default=lambda _prefix: False)

    def matrix(self, name: str, *shape: int) -> Tensor:
        return self.source(name, shape).to(self.device, self.dtype)

    def vector(self, name: str, *shape: int) -> Tensor:
        return self.source(name, shape).to(self.device, torch.float32)

    def gain(self, name: str, size: int) -> Tensor:
        return self.vector(name, size) + 1.0

    def gdn(self, at: str) -> GdnWeights:
        c = self.config
        h, hv, at_ = c.hidden_size, c.gdn_value_heads, f"{at}linear_attn."
        rows = {
            "in_proj_qkv": c.conv_dim,
            "in_proj_z": c.value_size,
            "in_proj_b": hv,
            "in_proj_a": hv,
        }
        parts = [self.matrix(f"{at_}{name}.weight", n, h) for name, n in rows.items()]
        return GdnWeights(
            config=c,
            norm=self.gain(f"{at}input_layernorm.weight", h),
            w_in=torch.cat(parts),
            conv=self.vector(f"{at_}conv1d.weight", c.conv_dim, 1, c.conv_width)[:, 0],
            a_log=self.vector(f"{at_}A_log", hv),
            dt_bias=self.vector(f"{at_}dt_bias", hv),
            gate_norm=self.vector(f"{at_}norm.weight", c.gdn_value_dim),
            w_out=self.matrix(f"{at_}out_proj.weight", h, c.value_size),
        )

    def attention(self, at: str) -> AttentionWeights:
        c = self.config
        h, d, at_ = c.hidden_size, c.head_dim, f"{at}self_attn."
        rows = {"q_proj": 2 * c.num_heads * d, "k_proj": c.num_kv_heads * d}
        rows["v_proj"] = rows["k_proj"]
        parts = [self.matrix(f"{at_}{name}.weight", n, h) for name, n in rows.items()]
        return AttentionWeights(
            config=c,
            norm=self.gain(f"{at}input_layernorm.weight", h),
            w_qkv=torch.cat(parts),
            q_norm=self.gain(f"{at_}q_norm.weight", d),
            k_norm=self.gain(f"{at_}k_norm.weight", d),
            w_o=self.matrix(f"{at_}o_proj.weight", h, c.num_heads * d),
            cos=self.cos,
            sin=self.sin,
        )

    def mlp(self, at: str) -> MlpWeights:
        c = self.config
        h, i = c.hidden_size, c.intermediate_size
        parts = [self.matrix(f"{at}mlp.{name}_proj.weight", i, h) for name in ("gate", "up")]
        return MlpWeights(
            config=c,
            norm=self.gain(f"{at}post_attention_layernorm.weight", h),
            gate_up=torch.cat(parts),
            down=self.matrix(f"{at}mlp.down_proj.weight", h, i),
        )

    def moe(self, at: str) -> MoeWeights:
        c = self.config
        h, e, i, shared = c.hidden_size, c.num_experts, c.expert_size, c.shared_expert_size
        stacked = e + (shared == i)
        gate_up = torch.empty(stacked, 2 * i, h, device=self.device, dtype=self.dtype)
        down = torch.empty(stacked, h, i, device=self.device, dtype=self.dtype)
        experts = f"{at}mlp.experts."
        if self.per_expert(experts):
            for n in range(e):
                gate_up[n, :i] = self.matrix(f"{experts}{n}.gate_proj.weight", i, h)
                gate_up[n, i:] = self.matrix(f"{experts}{n}.up_proj.weight", i, h)
                down[n] = self.matrix(f"{experts}{n}.down_proj.weight", h, i)
        else:
            gate_up[:e] = self.matrix(f"{experts}gate_up_proj", e, 2 * i, h)
            down[:e] = self.matrix(f"{experts}down_proj", e, h, i)
        names = ("gate", "up")
        at_ = f"{at}mlp.shared_expert."
        shared_up = torch.cat([self.matrix(f"{at_}{n}_proj.weight", shared, h) for n in names])
        shared_down = self.matrix(f"{at_}down_proj.weight", h, shared)
        if stacked > e:
            gate_up[e], down[e] = shared_up, shared_down
        router = self.matrix(f"{at}mlp.gate.weight", e, h)
        shared_gate = self.matrix(f"{at}mlp.shared_expert_gate.weight", 1, h)
        return MoeWeights(
            config=c,
            norm=self.gain(f"{at}post_attention_layernorm.weight", h),
            router=torch.cat((router, shared_gate)),
            gate_up=gate_up,
            down=down,
            shared_gate_up=None if stacked > e else shared_up,
            shared_down=None if stacked > e else shared_down,
        )

    def layer(self, at: str, kind: str) -> LayerWeights:
        mixer = self.gdn(at) if kind == "gdn" else self.attention(at)
        ffn = self.moe(at) if self.config.is_moe else self.mlp(at)
        return LayerWeights(mixer, ffn)

    def mtp(self) -> MtpWeights:
        h = self.config.hidden_size
        return MtpWeights(
            norm_embedding=self.gain("mtp.pre_fc_norm_embedding.weight", h),
            norm_hidden=self.gain("mtp.pre_fc_norm_hidden.weight", h),
            fc=self.matrix("mtp.fc.weight", h, 2 * h),
            layer=self.layer("mtp.layers.0.", "attention"),
            norm=self.gain("mtp.norm.weight", h),
        )

    def model(self, prefix: str, mtp: bool) -> ModelWeights:
        """All weights, with or without the MTP module."""
        c = self.config
        embed = self.matrix(f"{prefix}embed_tokens.weight", c.vocab_size, c.hidden_size)
        layers = [
            self.layer(f"{prefix}layers.{i}.", kind) for i, kind in enumerate(c.layer_types)
        ]
        norm = self.gain(f"{prefix}norm.weight", c.hidden_size)
        head = (
            embed if c.tied else self.matrix("lm_head.weight", c.vocab_size, c.hidden_size)
        )
        return ModelWeights(
            config=c,
            embed=embed,
            layers=layers,
            head=HeadWeights(c, norm, head),
            mtp=self.mtp() if mtp else None,
            cos=self.cos,
            sin=self.sin,
        )


def rotary_tables(
    config: ModelConfig, positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin ``[positions, rotary_dim/2]`` fp32 (angles in fp32)."""
    index = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float()
    frequency = 1.0 / (config.rope_theta ** (index / config.rotary_dim))
    angles = torch.arange(positions).float()[:, None] * frequency[None]
    return angles.cos().to(device), angles.sin().to(device)


def _mtp_names(config: ModelConfig, per_expert: Callable[[str], bool]) -> list[str]:
    """Every ``mtp.*`` tensor the module needs, in the order it is read."""
    names: list[str] = []

    def record(name: str, shape: tuple[int, ...]) -> Tensor:
        names.append(name)
        return torch.empty(shape, device="meta")

    meta = torch.device("meta")
    empty = torch.empty(0, device="meta")
    Builder(config, record, meta, torch.bfloat16, empty, empty, per_expert).mtp()
    return names


def load_model(
    folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype, positions: int
) -> ModelWeights:
    """Read a checkpoint folder; matrices in ``dtype``, vectors in fp32, on ``device``.

    ``positions``: length of the rotation tables. Raises CheckpointError naming file and tensor.
    A model without (all of) its MTP module loads with ``mtp`` None and ``missing_mtp`` filled.
    """
    files = Files.open(folder)
    styles = ("model.language_model.", "model.")
    prefix = next((s for s in styles if f"{s}embed_tokens.weight" in files.where), "model.")

    def per_expert(at: str) -> bool:
        return f"{at}0.gate_proj.weight" in files.where

    wanted = _mtp_names(config, per_expert)
    missing = [name for name in wanted if name not in files.where]
    cos, sin = rotary_tables(config, positions, device)
    builder = Builder(config, files.read, device, dtype, cos, sin, per_expert)
    weights = builder.model(prefix, mtp=not missing)
    weights.missing_mtp = missing
    tied_copy = {"lm_head.weight"} if config.tied else set()
    known = files.used | set(wanted) | tied_copy
    for name in sorted(set(files.where) - known):
        if not name.startswith(SKIPPED_PREFIXES):
            raise CheckpointError(f"{files.where[name]}: tensor {name} is unexpected")
    return weights


def random_source(
    config: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype
) -> Source:
    """Random tensors by checkpoint name, each drawn from (seed, name) alone, in any order.

    Matrices are N(0, 1/in) so that every product keeps the scale of its input, the two that write
    to the residual stream are divided by sqrt(2 * layers), the router is N(0, 4/in) so that its
    choice is sharp, gains are 1, and decays span the range of trained models.
    """
    generator = torch.Generator(device=device)
    depth = (2.0 * config.num_layers) ** -0.5

    def source(name: str, shape: tuple[int, ...]) -> Tensor:
        # A CPU generator takes the low 32 bits alone, so both parts must reach them.
        key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator.manual_seed(int.from_bytes(key[:8], "big") >> 1)
        if name.endswith("A_log"):
            return torch.empty(shape, device=device).uniform_(1, 16, generator=generator).log_()
        if name.endswith("dt_bias"):
            return torch.empty(shape, device=device).uniform_(-6.0, -2.0, generator=generator)
        if name.endswith("linear_attn.norm.weight"):
            return torch.ones(shape, device=device)
        if len(shape) == 1:
            return torch.zeros(shape, device=device)
        std = shape[-1] ** -0.5
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj")):
            std *= depth
        elif name.endswith("mlp.gate.weight"):
            std *= 2.0
        elif name.endswith("embed_tokens.weight"):
            std = 1.0 if not config.tied else shape[-1] ** -0.5
        return torch.empty(shape, device=device, dtype=dtype).normal_(
            0.0, std, generator=generator
        )

    return source


def random_model(
    config: ModelConfig,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    positions: int,
    mtp: bool = True,
) -> ModelWeights:
    """Random weights of the true shape, generated on ``device``. Never lossless, never "real"."""
    source = random_source(config, seed, device, dtype)
    cos, sin = rotary_tables(config, positions, device)
    builder = Builder(config, source, device, dtype, cos, sin)
    return builder.model("model.", mtp=mtp)
