"""Block kernels at true width: against the references, and bit by bit against themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_shapes import Make, close
from vkengine.config import KNOWN_SHAPES, ModelConfig
from vkengine.ops.attention import reference as attention_reference
from vkengine.ops.attention import triton as attention_kernels
from vkengine.ops.gdn import reference as gdn_reference
from vkengine.ops.gdn import triton as gdn_kernels
from vkengine.ops.mlp import reference as mlp_reference
from vkengine.ops.mlp import triton as mlp_kernels
from vkengine.ops.moe import reference as moe_reference
from vkengine.ops.moe import triton as moe_kernels
from vkengine.rows import Rows, Workspace
from vkengine.state import State

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
MAX_LEN = 1008


def shape(name: str) -> ModelConfig:
    return replace(
        KNOWN_SHAPES[name], num_layers=2, layer_types=("gdn", "attention"), max_positions=2048
    )


MOE, DENSE = shape("qwen35-35b-a3b"), shape("qwen36-27b")


def make(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Make:
    return Make(config, "cuda", dtype)


def rows_at(pairs: list[tuple[int, int]], m: int) -> Rows:
    both = torch.tensor(pairs, dtype=torch.int32, device=CUDA)
    valid = torch.ones(len(pairs) * m, dtype=torch.bool, device=CUDA)
    return Rows(both[:, 0].contiguous(), both[:, 1].contiguous(), m, valid)


def filled(t: Make, slots: int = 3) -> State:
    """A state with random keys and values, ready for positions up to 900."""
    state = t.state(slots, MAX_LEN)
    for part in (state.k, state.v):
        part.copy_(t.normal(*part.shape))
    state.S.copy_(t.normal(*state.S.shape, std=0.1))
    state.conv.copy_(t.normal(*state.conv.shape))
    return state


def clone(state: State) -> dict[str, torch.Tensor]:
    names = ("k", "v", "conv", "S", "ring_k", "ring_u", "ring_g", "folded")
    return {name: getattr(state, name).clone() for name in names}


def restore(state: State, saved: dict[str, torch.Tensor]) -> None:
    for name, value in saved.items():
        getattr(state, name).copy_(value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", [MOE, DENSE], ids=["35b", "27b"])
def test_blocks_agree_with_the_references(config: ModelConfig, dtype: torch.dtype) -> None:
    t = make(config, dtype)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    ws = Workspace(CUDA)
    gdn, attention = t.gdn(), t.attention()
    state = filled(t)
    saved = clone(state)
    for m in (1, 4):
        h = t.normal(2 * m, config.hidden_size)
        rows = rows_at([(2, 700), (0, 62)], m)
        for kernels, reference, w, layer in (
            (gdn_kernels.gdn, gdn_reference.gdn, gdn, 0),
            (attention_kernels.attention, attention_reference.attention, attention, 1),
        ):
            state.folded[:] = torch.tensor([62, 0, 700, 0], device=CUDA)
            want, got = h.clone(), h.clone()
            reference(want, w, state.layers[layer], rows, Workspace(CUDA))  # type: ignore
            after = clone(state)
            restore(state, saved)
            state.folded[:] = torch.tensor([62, 0, 700, 0], device=CUDA)
            kernels(got, w, state.layers[layer], rows, ws)  # type: ignore
            close(got - h, want - h, tolerance)
            for name in ("k", "v", "conv", "S", "ring_k", "ring_u", "ring_g"):
                close(getattr(state, name) + 1e-6, after[name] + 1e-6, tolerance)
            restore(state, saved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_feed_forward_agrees_with_the_reference(dtype: torch.dtype) -> None:
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    for config, kernels, reference, name in (
        (MOE, moe_kernels.moe, moe_reference.moe, "moe"),
        (DENSE, mlp_kernels.mlp, mlp_reference.mlp, "mlp"),
    ):
        t = make(config, dtype)
        w = getattr(t, name)()
        for m in (1, 3, 4, 8):
            h = t.normal(m, config.hidden_size)
            want, got = h.clone(), h.clone()
            reference(want, w, None, None, Workspace(CUDA))  # type: ignore
            kernels(got, w, None, None, Workspace(CUDA))  # type: ignore
            close(got - h, want - h, tolerance)


@pytest.mark.parametrize("m", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("config", [MOE, DENSE], ids=["35b", "27b"])
def test_rows_are_bit_equal_alone_and_together(config: ModelConfig, m: int) -> None:
    """One round of m rows equals m rounds of one row, in outputs and in state; and a second
    sequence beside it changes nothing."""
    t = make(config)
    ws = Workspace(CUDA)
    gdn, attention = t.gdn(), t.attention()
    state = filled(t)
    saved = clone(state)
    h = t.normal(m, config.hidden_size)
    pos = 62  # crosses a split's boundary
    for kernels, w, layer in (
        (gdn_kernels.gdn, gdn, 0),
        (attention_kernels.attention, attention, 1),
    ):
        restore(state, saved)
        state.folded.fill_(pos)
        together = h.clone()
        kernels(together, w, state.layers[layer], rows_at([(1, pos)], m), ws)  # type: ignore
        state.folded[1] = pos
        nothing = t.normal(1, config.hidden_size)
        kernels(nothing, w, state.layers[layer], rows_at([(1, pos + m)], 1), ws)  # type: ignore
        drafted = clone(state)

        restore(state, saved)
        state.folded.fill_(pos)
        single = []
        for j in range(m):
            row = h[j : j + 1].clone()
            kernels(row, w, state.layers[layer], rows_at([(1, pos + j)], 1), ws)  # type: ignore
            state.folded[1] = pos + j
            single.append(row)
        kernels(
            nothing,
            w,
            state.layers[layer],
            rows_at([(1, pos + m)], 1),
            ws,  # type: ignore
        )
        assert torch.equal(together, torch.cat(single))
        for name in ("S",) if layer == 0 else ("k", "v"):
            a, b = drafted[name][:, 1], getattr(state, name)[:, 1]
            if layer == 1:
                a, b = a[:, : pos + m], b[:, : pos + m]
            assert torch.equal(a, b), name

        restore(state, saved)
        state.folded.fill_(pos)
        beside = torch.cat((t.normal(m, config.hidden_size), h))
        kernels(beside, w, state.layers[layer], rows_at([(0, pos), (1, pos)], m), ws)  # type: ignore
        assert torch.equal(beside[m:], together)


@pytest.mark.parametrize("m", [2, 3, 4, 5, 8, 12])
def test_feed_forward_rows_are_bit_equal(m: int) -> None:
    for config, kernels, name in (
        (MOE, moe_kernels.moe, "moe"),
        (DENSE, mlp_kernels.mlp, "mlp"),
    ):
        t = make(config)
        w = getattr(t, name)()
        ws = Workspace(CUDA)
        h = t.normal(m, config.hidden_size)
        h[1] = h[0] * 1.01  # shares experts with row 0
        together = h.clone()
        kernels(together, w, None, None, ws)  # type: ignore
        for j in range(m):
            row = h[j : j + 1].clone()
            kernels(row, w, None, None, ws)  # type: ignore
            assert torch.equal(row[0], together[j]), (name, j)
