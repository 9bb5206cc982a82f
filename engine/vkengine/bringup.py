"""From the words of a command line to an engine and its tokenizer; heavy imports wait for use."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from .engine import Engine
    from .sampling import Draft
    from .tokenizer import Tokenizer


class StartFailed(Exception):
    """This machine or checkpoint cannot do what was asked: exit 3."""


class Profile(StrEnum):
    vkae = "vkae"
    vkue = "vkue"
    stock = "stock"
    stock_compiled = "stock-compiled"

    @property
    def is_stock(self) -> bool:
        return self in (Profile.stock, Profile.stock_compiled)


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


def load_engine_for(
    model: str,
    profile: Profile,
    weights: str,
    device: Device,
    dtype: Dtype,
    threads: int | None,
    max_model_len: int | None,
    max_sequences: int,
    default_draft: Draft,
) -> Engine:
    """Raises StartFailed for everything a user can mend."""
    if profile.is_stock:
        if default_draft.method != "none":
            raise typer.BadParameter("--draft: the stock profile does not draft")
        from .stock_model import StockLoadError, load_stock

        try:
            return load_stock(  # ty: ignore[invalid-explicit-return]
                model, weights=weights, device=device.value, dtype=dtype.value,
                threads=threads, max_model_len=max_model_len,
                compiled=profile is Profile.stock_compiled,
            )  # fmt: skip
        except StockLoadError as error:
            raise StartFailed(str(error)) from error
    from .checkpoint import CheckpointError
    from .engine import load_engine

    try:
        return load_engine(
            model, profile=profile.value, weights=weights, device=device.value,
            dtype=dtype.value, threads=threads, max_model_len=max_model_len,
            max_sequences=max_sequences, default_draft=default_draft,
        )  # fmt: skip
    except CheckpointError as error:
        raise StartFailed(str(error)) from error


def tokenizer_for(model: str) -> Tokenizer | None:
    from .digest import checkpoint_folder
    from .tokenizer import Tokenizer

    folder = checkpoint_folder(model)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    return Tokenizer(folder)


def model_settings(model: str) -> dict[str, Any]:
    from .digest import checkpoint_folder, model_digest
    from .server.completions import SAMPLER_DEFAULTS

    folder = checkpoint_folder(model)
    return {
        "model_digest": None if folder is None else model_digest(folder),
        "sampler_defaults": SAMPLER_DEFAULTS,
    }


def parse_draft(text: str) -> Draft:
    from .sampling import Draft

    method, _, depth = text.partition(":")
    if method not in ("none", "mtp", "ngram") or (method == "none") == bool(depth):
        raise typer.BadParameter(f"--draft '{text}': must be none, mtp:K or ngram:K")
    if depth and depth != "auto" and not (depth.isdigit() and 1 <= int(depth) <= 8):
        raise typer.BadParameter(f"--draft '{text}': K is 1 to 8 or auto")
    return Draft(method, int(depth) if depth.isdigit() else depth or 0)
