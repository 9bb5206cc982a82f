"""The prompt path on a GPU: against the decode kernels, cut at chunks, drafts on and off."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from vkengine.checkpoint import random_model
from vkengine.config import KNOWN_SHAPES
from vkengine.feed import Feed
from vkengine.gpu_prefill import Prefill
from vkengine.graph import Round
from vkengine.lanes import WIDTH, Lanes
from vkengine.models.layout import ModelWeights
from vkengine.rows import Workspace
from vkengine.state import State

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
MAX_LEN = 1008
PARTS = ("k", "v", "mtp_k", "mtp_v")


def build(model: str, dtype: torch.dtype) -> ModelWeights:
    config = replace(
        KNOWN_SHAPES[model], num_layers=4, layer_types=("gdn", "gdn", "gdn", "attention")
    )
    return random_model(config, 0, CUDA, dtype, MAX_LEN + 64)


def fresh(w: ModelWeights, dtype: torch.dtype) -> State:
    return State(w.config, 1, MAX_LEN, CUDA, dtype, True)


def prompt(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    tokens = torch.randint(0, 30000, (n + WIDTH,), generator=generator)
    return tokens.to(CUDA, torch.int32)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def logits_after(w: ModelWeights, state: State, token: int, pos: int) -> torch.Tensor:
    lanes = Lanes.make(1, 1, CUDA)
    lanes.join(0, 0, token, pos)
    one = Round(w, state, lanes, Workspace(CUDA), 0)
    one.run()
    return one.logits.clone()


@pytest.mark.parametrize(
    ("model", "dtype", "n"),
    [
        ("qwen35-35b-a3b", torch.bfloat16, 333),
        ("qwen35-35b-a3b", torch.float32, 131),
        ("qwen36-27b", torch.bfloat16, 200),
        ("qwen36-27b", torch.float32, 65),
    ],
)
def test_state_is_that_of_the_decode_kernels(model: str, dtype: torch.dtype, n: int) -> None:
    w = build(model, dtype)
    tokens = prompt(n)
    mine, theirs = fresh(w, dtype), fresh(w, dtype)
    Feed.make(w, theirs, Workspace(CUDA)).prompt(0, tokens, 0, n)
    Prefill(w, mine, Workspace(CUDA)).prompt(0, tokens, 0, n)
    # Four random layers amplify the roundings of bf16 that each path places elsewhere.
    limit = 1e-4 if dtype == torch.float32 else 1e-2
    errors = {"S": error(mine.recurrent(0, n), theirs.recurrent(0, n))}
    for name in PARTS:
        a, b = getattr(mine, name), getattr(theirs, name)
        a, b = (x[:, 0] if x.dim() == 5 else x[0] for x in (a, b))
        errors[name] = error(a[..., :n, :, :], b[..., :n, :, :])
        assert not a[..., n:, :, :].any(), "padding rows reached the cache"
    recent = torch.arange(n - 3, n, device=CUDA) % 16
    errors["conv"] = error(mine.conv[:, 0, recent], theirs.conv[:, 0, recent])
    last = int(tokens[n])
    errors["logits"] = error(logits_after(w, mine, last, n), logits_after(w, theirs, last, n))
    assert max(errors.values()) < limit, errors


def test_cuts_at_chunks_leave_equal_bits() -> None:
    w = build("qwen35-35b-a3b", torch.bfloat16)
    tokens = prompt(700)
    states = []
    for cuts in ((0, 700), (0, 256, 700), (0, 256, 512, 700), (0, 700)):
        state = fresh(w, torch.bfloat16)
        prefill = Prefill(w, state, Workspace(CUDA), chunk=256)
        for start, end in itertools.pairwise(cuts):
            prefill.prompt(0, tokens, start, end)
        states.append(state)
    for other in states[1:]:
        for name in (*PARTS, "S", "conv"):
            assert torch.equal(getattr(states[0], name), getattr(other, name)), name


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_do_not_depend_on_drafts(temperature: float) -> None:
    w = build("qwen35-35b-a3b", torch.bfloat16)
    tokens = prompt(300)
    out = []
    for k in (0, 3):
        state = fresh(w, torch.bfloat16)
        Prefill(w, state, Workspace(CUDA)).prompt(0, tokens, 0, 300)
        lanes = Lanes.make(1, 1, CUDA)
        lanes.join(0, 0, int(tokens[300]), 300, seed=5, temperature=temperature)
        one = Round(w, state, lanes, Workspace(CUDA), k)
        got: list[int] = []
        while len(got) < 96:
            one.run()
            row = lanes.record[0].tolist()
            got += row[: row[-1]]
        out.append(got[:96])
    assert out[0] == out[1]
