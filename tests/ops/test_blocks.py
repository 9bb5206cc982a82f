"""Block kernels against the torch references, under the interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from kernel_shapes import Make, close, small_config
from torch import Tensor
from vkengine.ops.attention import reference as attention_reference
from vkengine.ops.gdn import reference as gdn_reference
from vkengine.ops.mlp import reference as mlp_reference
from vkengine.ops.moe import reference as moe_reference
from vkengine.rows import Rows, Workspace
from vkengine.state import State

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="triton was imported without its interpreter"
)
torch.set_num_threads(1)
CPU = torch.device("cpu")


def make(dtype: torch.dtype = torch.float32, **changes: object) -> Make:
    return Make(small_config(**changes), "cpu", dtype)


def poisoned() -> Workspace:
    return Workspace(CPU)


def poison(ws: Workspace) -> None:
    for key, buffer in ws.buffers.items():
        if not str(key[0]).startswith(("counter", "gain")):
            buffer.fill_(float("nan") if buffer.is_floating_point() else -1)


def same_state(a: State, b: State, tolerance: float) -> None:
    for name in ("k", "v", "conv", "S", "ring_k", "ring_u", "ring_g"):
        x, y = getattr(a, name).float(), getattr(b, name).float()
        assert torch.allclose(x, y, rtol=tolerance, atol=tolerance), name


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's cost is per program."""
    from vkengine.ops.moe import triton as kernels

    monkeypatch.setattr(kernels, "GATE_UP_BN", 8)
    monkeypatch.setattr(kernels, "DOWN_BN", 32)


@pytest.mark.parametrize(
    ("rows", "dtype", "hidden"),
    [(1, torch.float32, 48), (3, torch.bfloat16, 48), (3, torch.bfloat16, 64)],
)
def test_moe(rows: int, dtype: torch.dtype, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vkengine.ops.moe import triton as kernels

    t = make(dtype, hidden_size=hidden)
    w = t.moe()
    h = t.normal(rows, hidden)
    want = h.clone()
    moe_reference.moe(want, w, None, None, Workspace(CPU))
    ws = poisoned()
    for _ in range(2):  # the second run finds poison in scratch and its counters at zero
        got = h.clone()
        kernels.moe(got, w, None, None, ws)  # type: ignore[arg-type]
        close(got - h, want - h, 2e-2 if dtype == torch.bfloat16 else 1e-5)
        poison(ws)


def test_routing_ties_and_nan() -> None:
    from vkengine.ops.moe import triton as kernels

    t = make()
    w = t.moe()
    w.router[1:9] = w.router[0]
    h = t.normal(3, 48)
    h[2] = float("nan")
    ws = poisoned()
    kernels.moe(h, w, None, None, ws)  # type: ignore[arg-type]
    ids = ws.get("moe.ids", (3, 3), torch.int32)
    logits = ws.get("moe.logits", (3, 11))
    for r in range(2):
        order = sorted(range(10), key=lambda e: (-float(logits[r, e]), e))
        assert ids[r].tolist() == order[:3]
    assert ids[2].tolist() == [0, 1, 2]


@pytest.mark.parametrize("rows", [3])
def test_mlp(rows: int) -> None:
    from vkengine.ops.mlp import triton as kernels

    t = make()
    w = t.mlp()
    h = t.normal(rows, 48)
    want = h.clone()
    mlp_reference.mlp(want, w, None, None, Workspace(CPU))
    kernels.mlp(h, w, None, None, poisoned())  # type: ignore[arg-type]
    close(h, want, 1e-5)


def rounds(pairs: list[tuple[int, int]], m: int) -> Rows:
    return Rows.on_host(pairs, m)


@pytest.mark.slow
def test_gdn_rounds_and_rollback() -> None:
    """Three rounds, the second partly rejected: state and outputs follow the reference."""
    from vkengine.ops.gdn import triton as kernels

    t = make()
    w = t.gdn()
    mine, theirs = t.state(), t.state()
    ws = poisoned()
    for pos0, m in ((0, 2), (2, 2), (3, 1)):
        slots = (1, 0) if pos0 == 2 else (1,)
        h = t.normal(len(slots) * m, 48)
        want = h.clone()
        rows = rounds([(slot, pos0) for slot in slots], m)
        gdn_reference.gdn(want, w, theirs.layers[0], rows, Workspace(CPU))  # type: ignore[arg-type]
        kernels.gdn(h, w, mine.layers[0], rows, ws)  # type: ignore[arg-type]
        close(h, want, 1e-5)
        same_state(mine, theirs, 1e-5)
        for state in (mine, theirs):
            state.folded[list(slots)] = pos0
        poison(ws)


@pytest.mark.slow
def test_attention_rounds() -> None:
    """Rows before, across and after a split's boundary, with two sequences apart."""
    from vkengine.ops.attention import triton as kernels

    t = make()
    w = t.attention()
    mine, theirs = t.state(), t.state()
    for state in (mine, theirs):
        generator = torch.Generator().manual_seed(3)
        for part in (state.k, state.v):
            part.copy_(torch.randn(part.shape, generator=generator))
    ws = poisoned()
    for first, second, m in ((0, 5, 1), (62, 7, 2)):
        h = t.normal(2 * m, 48)
        want = h.clone()
        rows = rounds([(1, first), (0, second)], m)
        attention_reference.attention(want, w, padded(theirs), rows, Workspace(CPU))
        kernels.attention(h, w, mine.layers[1], rows, ws)  # type: ignore[arg-type]
        close(h, want, 1e-5)
        for name in ("k", "v"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert torch.allclose(a[:, :2], b[:, :2], atol=1e-5), name
        poison(ws)


def padded(state: State) -> object:
    """The attention layer's state, long enough for the reference's splits of 256."""

    class View:
        def __init__(self, base: Tensor) -> None:
            self.base = base

        def __getitem__(self, slot: int) -> Tensor:
            more = torch.zeros(256 - self.base.shape[1], *self.base.shape[2:])
            return torch.cat((self.base[slot], more))

        def __setitem__(self, key: object, value: Tensor) -> None:
            self.base[key] = value  # type: ignore[index]

        @property
        def dtype(self) -> torch.dtype:
            return self.base.dtype

    class Layer:
        k = View(state.k[0])
        v = View(state.v[0])

    return Layer()


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize(("n", "k"), [(12, 32), (20, 64), (20, 24)])
def test_gemv_rows_do_not_depend_on_their_number(n: int, k: int, rows: int) -> None:
    """Bits of row 0 alone equal its bits beside others, norm and residual included; with tensor
    cores (20 x 64) and without. Few enough partial squares that numpy adds them in one order."""
    from vkengine.ops.triton_launch import Stream, gemv, stream_of

    t = make(torch.bfloat16)
    w = t.matrix(n, k)
    h = t.normal(rows, k)
    gain = t.gain(k)
    ws = Workspace(CPU)
    x = stream_of(h, gain, torch.bfloat16, ws)
    out = torch.full((rows, n), float("nan"))
    gemv(w, x.hx, out, eps=1e-6, norm=x.squares)
    for r in range(rows):
        alone = torch.full((1, n), float("nan"))
        gemv(w, x.hx[r : r + 1], alone, eps=1e-6, norm=x.squares[r : r + 1])
        assert torch.equal(alone[0], out[r])
    scaled = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    close(out, (scaled * gain) @ w.float().T, 1e-2)
    into = Stream(
        torch.ones(rows, n),
        torch.full((rows, n), float("nan")).bfloat16(),
        torch.full((rows, n // 4), float("nan")),
    )
    after = t.normal(n, std=0.1).bfloat16()
    gemv(w, x.hx, None, stream=into, gain=after)
    close(into.h - 1, x.hx.float() @ w.float().T, 1e-5)
    close(into.hx, into.h * (1 + after.float()), 1e-2)
    close(into.squares, into.h.square().unflatten(1, (-1, 4)).sum(-1), 1e-5)


@pytest.mark.parametrize(("heads", "head", "n"), [(4, 32, 20), (3, 16, 20)])
def test_gated_norm_in_the_product(heads: int, head: int, n: int) -> None:
    """x scaled per head from partial sums of squares; heads of 32 go to the tensor cores."""
    from vkengine.ops.triton_launch import Stream, gemv

    t = make()
    rows, k = 3, heads * head
    w, x = t.matrix(n, k), t.normal(rows, k)
    squares = t.normal(rows, heads, 2).square() * head
    into = Stream(torch.ones(rows, n), torch.empty(rows, n), torch.empty(rows, n // 4))
    gain = t.normal(n, std=0.1)
    gemv(w, x, None, eps=1e-6, squares=squares, head=head, stream=into, gain=gain)
    factor = torch.rsqrt(squares.sum(-1) / head + 1e-6)
    close(into.h - 1, (x * factor.repeat_interleave(head, 1)) @ w.T, 1e-5)
