"""The prompt path's kernels under the interpreter against token-by-token references."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from kernel_shapes import Make, close, small_config
from torch import Tensor
from vkengine.models.layout import HeadWeights, LayerWeights, ModelWeights, MtpWeights
from vkengine.ops.attention import reference as attention_reference
from vkengine.ops.gdn import reference as gdn_reference
from vkengine.ops.mlp import reference as mlp_reference
from vkengine.ops.moe import reference as moe_reference
from vkengine.ops.norm import rms_norm
from vkengine.rows import Rows, Workspace
from vkengine.state import State

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="triton was imported without its interpreter"
)
torch.set_num_threads(1)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors hold NaN (or a wild integer) until something writes them."""
    original = torch.empty

    def empty(*args: object, **kwargs: object) -> Tensor:
        found = original(*args, **kwargs)  # type: ignore[call-overload]
        return found.fill_(float("nan") if found.is_floating_point() else 1 << 20)

    for name in ("gdn.chunk", "moe.grouped", "attention.chunk", "rowwise"):
        monkeypatch.setattr(f"vkengine.ops.{name}.torch.empty", empty)


@pytest.fixture(autouse=True)
def loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter holds a scalar as an array of one, which numpy no longer indexes."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


def model(moe: bool) -> tuple[Make, ModelWeights]:
    changes = {} if moe else {"num_experts": 0, "experts_per_token": 0, "expert_size": 0}
    t = Make(small_config(**changes), "cpu", torch.float32)
    c = t.c

    def layer(kind: str) -> LayerWeights:
        mixer = t.gdn() if kind == "gdn" else t.attention()
        return LayerWeights(mixer, t.moe() if moe else t.mlp())

    cos, sin = t.rope()
    h = c.hidden_size
    mtp = MtpWeights(t.gain(h), t.gain(h), t.matrix(h, 2 * h), layer("attention"), t.gain(h))
    head = HeadWeights(c, t.gain(h), t.matrix(c.vocab_size, h))
    layers = [layer(kind) for kind in c.layer_types]
    return t, ModelWeights(c, t.normal(c.vocab_size, h), layers, head, mtp, cos, sin)


def by_token(
    w: ModelWeights, state: State, slot: int, tokens: Tensor, start: int, end: int
) -> None:
    """The same prompt through the reference ops, one row a round."""
    c, ws, mtp = w.config, Workspace(CPU), w.mtp
    assert mtp is not None and state.mtp is not None
    for p in range(start, end):
        rows = Rows.on_host([(slot, p)], 1)
        h = w.embed[tokens[p : p + 1].long()].clone()
        for layer, part in zip(w.layers, state.layers, strict=True):
            feed = moe_reference.moe if c.is_moe else mlp_reference.mlp
            mix = gdn_reference.gdn if hasattr(part, "S") else attention_reference.attention
            mix(h, layer.mixer, part, rows, ws)  # type: ignore[arg-type]
            feed(h, layer.ffn, None, rows, ws)  # type: ignore[arg-type]
        state.folded[slot] = p
        hidden = rms_norm(rms_norm(h, w.head.norm, c.rms_eps), mtp.norm_hidden, c.rms_eps)
        e = rms_norm(w.embed[tokens[p + 1 : p + 2].long()], mtp.norm_embedding, c.rms_eps)
        x = torch.cat((e, hidden), dim=1) @ mtp.fc.T  # type: ignore[operator]
        attention_reference.attention(x, mtp.layer.mixer, state.mtp, rows, ws)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("moe", "start", "end"),
    [
        (False, 0, 3),
        pytest.param(True, 64, 65, marks=pytest.mark.slow),
        pytest.param(False, 64, 101, marks=pytest.mark.slow),
    ],
)
def test_state_is_that_of_single_tokens(
    moe: bool, start: int, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vkengine import gpu_prefill
    from vkengine.gpu_prefill import Prefill

    monkeypatch.setattr(gpu_prefill, "ROWS", 64)  # the interpreter's cost is per program
    t, w = model(moe)
    mine, theirs = t.state(2, 230), t.state(2, 230)
    tokens = torch.randint(0, 300, (end + 1,), generator=torch.Generator().manual_seed(4)).int()
    by_token(w, theirs, 1, tokens, 0, end)
    prefill = Prefill(w, mine, Workspace(CPU), chunk=64)
    prefill.prompt(1, tokens, 0, start)
    prefill.prompt(1, tokens, start, end)
    assert int(mine.folded[1]) == end
    for layer in range(mine.S.shape[0]):
        close(mine.S[layer, 1], theirs.recurrent(1, end)[layer], 1e-5)
    recent = torch.arange(max(0, end - 3), end) % 16
    close(mine.conv[:, 1, recent], theirs.conv[:, 1, recent], 1e-5)
    for name in ("k", "v", "mtp_k", "mtp_v"):
        a, b = getattr(mine, name), getattr(theirs, name)
        at = (Ellipsis, slice(0, end), slice(None), slice(None))
        a, b = (x[:, 1] if x.dim() == 5 else x[1] for x in (a, b))
        close(a[at], b[at], 1e-5)
        assert not a[..., end:, :, :].any(), "padding rows reached the cache"
    for part in (mine.S, mine.conv, mine.k, mine.v):
        assert not part[:, [0, 2]].any(), "another slot was touched"
    if start == 0:
        return
    whole = t.state(2, 230)
    Prefill(w, whole, Workspace(CPU), chunk=64).prompt(1, tokens, 0, end)
    for name in ("S", "conv", "k", "v", "mtp_k", "mtp_v"):
        assert torch.equal(getattr(mine, name), getattr(whole, name)), name


def test_equal_keys_and_strong_updates() -> None:
    """A prompt of one repeated token: the block's system is as ill-scaled as it gets."""
    from vkengine.ops.gdn import chunk

    t = Make(small_config(), "cpu", torch.float32)
    w = t.gdn()
    w.a_log.fill_(-9.0)
    mine, theirs = t.state(1, 200), t.state(1, 200)
    h = t.normal(1, 48).expand(128, 48).contiguous()
    y = torch.nn.functional.linear(rms_norm(h, w.norm, 1e-6), w.w_in)  # type: ignore[arg-type]
    y[:, -6:-3] = 9.0  # beta close to 1
    original = gdn_reference.project

    def project(one: Tensor, layer: object) -> object:
        qkv, z, beta, decay = original(one, w)
        return qkv, z, torch.full_like(beta, torch.tensor(9.0).sigmoid().item()), decay

    gdn_reference.project = project  # type: ignore[assignment]
    try:
        for p in range(128):
            one = h[p : p + 1].clone()
            gdn_reference.gdn(one, w, theirs.layers[0], Rows.on_host([(0, p)], 1), Workspace(CPU))  # type: ignore[arg-type]
            theirs.folded[0] = p
    finally:
        gdn_reference.project = original
    chunk.mix(y, w, mine.layers[0], 0, 0, 128, Workspace(CPU))  # type: ignore[arg-type]
    close(mine.S[0, 0], theirs.recurrent(0, 128)[0], 1e-4)


@pytest.mark.slow
def test_routing_ties_nan_and_tiles() -> None:
    """Experts with no row, with more rows than a tile, tied logits, a NaN row beside others."""
    from vkengine.ops.moe import grouped

    t = Make(small_config(), "cpu", torch.float32)
    w = t.moe()
    w.router[1:4] = w.router[0]
    h = t.normal(192, 48)
    h[130:] = h[0]  # one choice of experts for many rows
    want = h.clone()
    moe_reference.moe(want[:150], w, None, None, Workspace(CPU))  # type: ignore[arg-type]
    got = h.clone()
    grouped.moe(got, w, 150)
    close(got[:150] - h[:150], want[:150] - h[:150], 1e-5)
    assert torch.equal(got[150:], h[150:])
    poisoned = h.clone()
    poisoned[7] = float("nan")
    grouped.moe(poisoned, w, 150)
    others = [r for r in range(150) if r != 7]
    close(poisoned[others], got[others], 1e-6)
    assert poisoned[7].isnan().all()
