"""Parameters from safetensors files, or random ones of the true shape.

Both checkpoint name styles are read (``model.language_model.*`` and ``model.*``), tied and untied
heads, and MTP experts fused or one by one. Every tensor of the text model must be there with its
shape, and nothing unknown may be; vision tensors (``model.visual.*``) are skipped knowingly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import ModelConfig
from .models.build import Builder, Source, rotary_tables
from .models.layout import ModelWeights

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
def _reading(path: Path) -> Generator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: unreadable or truncated: {error}") from None


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
        return torch.empty(shape, device=device, dtype=dtype).normal_(0.0, std, generator=generator)

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
