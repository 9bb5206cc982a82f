"""Bit equality on the bundled model, whose bf16 weights take the half-precision packed products."""

from __future__ import annotations

import functools

import pytest
import torch
from qwen import generate
from vkengine.engine import load_engine
from vkengine.ops.linear.packed import pack
from vkengine.sampling import Draft, SamplingParams


@functools.cache
def tiny():
    return load_engine("vk-tiny", max_model_len=640, threads=1)


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(1, 4096, (length,), generator=generator).tolist()


@functools.cache
def plain(temperature: float, length: int) -> list[int]:
    """The same for every k and method."""
    return generate(tiny(), prompt(length), sampling(temperature))


def sampling(temperature: float, draft: Draft | None = None) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, top_p=0.9, seed=11, max_tokens=48, ignore_eos=True, draft=draft
    )


def test_the_half_form_is_in_use_and_exact() -> None:
    packed = tiny().model.weights.layers[0].mixer.packed
    assert packed.w_in.form == "half"
    w = torch.randn(64, 96).bfloat16()
    x = torch.randn(5, 96)
    assert pack(w).form == "half"
    assert (pack(w).apply(x) - x @ w.float().T).abs().max() < 1e-4
    small = pack(w.float() * 2.0**-20)  # below fp16's normal range: needs the scale
    assert small.form == "half" and small.scale > 1
    assert (small.apply(x) * 2.0**20 - x @ w.float().T).abs().max() < 1e-4
    assert pack(torch.randn(64, 96)).form != "half"  # fp32 values do not survive fp16


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_change_nothing(k: int, temperature: float) -> None:
    for length in (5, 250):
        want = plain(temperature, length)
        assert len(want) == 48
        for method in ("mtp", "ngram"):
            got = generate(tiny(), prompt(length), sampling(temperature, Draft(method, k)))
            assert got == want, (length, method)
