"""Cases of single parts: norms, products, experts, routing, pruned heads, padded rows, dtypes."""

from __future__ import annotations

import functools

import pytest
import torch
from qwen import VOCAB, checkpoint, engine, generate, prompt
from torch import Tensor
from vkengine.bench import render
from vkengine.costs import round_costs
from vkengine.engine import Engine, load_engine
from vkengine.models.layout import GdnWeights, MoeWeights
from vkengine.ops.linear import pack
from vkengine.ops.moe import reference as moe_reference
from vkengine.ops.moe.reference import top_k
from vkengine.ops.norm import rms_norm
from vkengine.ops.norm.cpu import inverse_norm
from vkengine.prefill import delta_rule, state_after
from vkengine.sampler import Sampler, make_processors
from vkengine.sampling import Draft, SamplingParams
from vkengine.state import State
from vkengine.step import Lane, run_round

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
MANY = 40


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@functools.cache
def any_engine() -> Engine:
    return engine()


def run_moe(h: Tensor, *, packed: bool) -> Tensor:
    """What the engine's first feed-forward adds to ``h``."""
    eng = any_engine()
    block, weights, _ = next(b for b in eng.model.plan if isinstance(b[1], MoeWeights))
    out = h.clone()
    with torch.inference_mode():
        if packed:
            assert weights.packed is not None
            block(out, weights, None, None, eng.model.ws)
        else:
            moe_reference.moe(out, _plain_moe(), None, None, eng.model.ws)  # type: ignore[arg-type]
    return out - h


@functools.cache
def _plain_moe() -> MoeWeights:
    """The same weights before packing."""
    from vkengine.checkpoint import load_model
    from vkengine.config import read_config

    folder = checkpoint()
    config = read_config(folder)
    model = load_model(folder, config, torch.device("cpu"), torch.float32, 64)
    (first, *_) = [x.ffn for x in model.layers if isinstance(x.ffn, MoeWeights)]
    return first


def test_e66_a_norm_adds_in_one_order_for_every_row_count() -> None:
    x = normal(MANY, 2048)
    gain = normal(2048, seed=1)
    full = rms_norm(x, gain, 1e-6), inverse_norm(x, 1e-3)
    for m in range(1, MANY):
        for own, norm in zip(
            full, (rms_norm(x[:m], gain, 1e-6), inverse_norm(x[:m], 1e-3)), strict=True
        ):
            assert torch.equal(norm, own[:m]), m


@pytest.mark.parametrize("shape", [(64, 96), (512, 64), (33, 48)])
def test_e69_a_product_does_not_depend_on_the_row_count(shape: tuple[int, int]) -> None:
    """No library product that picks its algorithm by the number of rows."""
    weights = normal(*shape)
    x = normal(MANY, shape[1], seed=2)
    for w in (weights, weights.bfloat16()):
        matrix = pack(w)
        full = matrix.apply(x)
        assert torch.allclose(full, x @ w.float().T, atol=1e-3)
        for m in range(1, MANY):
            assert torch.equal(matrix.apply(x[:m].contiguous()), full[:m]), (matrix.form, m)


def test_e68_e80_expert_rows_do_not_depend_on_each_other() -> None:
    """Every row of 1..40 is computed, and with the bits it has alone."""
    h = normal(MANY, 64)
    full = run_moe(h, packed=True)
    assert full.abs().sum(-1).min() > 0
    for m in (1, 2, 3, 5, 8, 9, 17, 31):
        assert torch.equal(run_moe(h[:m], packed=True), full[:m]), m
    for r in range(MANY):
        assert torch.equal(run_moe(h[r : r + 1], packed=True)[0], full[r]), r
    want = run_moe(h, packed=False)
    assert (full - want).abs().max() < 1e-5


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (64, 8), (128, 8), (256, 8), (512, 10)])
def test_e78_ids_and_weights_for_every_number_of_experts(experts: int, k: int) -> None:
    logits = normal(9, experts, seed=experts).mul(2).round()  # many ties
    probs = torch.softmax(logits, -1)
    ids, values = top_k(probs, k)
    for row, own, got, weight in zip(logits.tolist(), probs, ids, values, strict=True):
        order = sorted(range(experts), key=lambda e, r=row: (-r[e], e))[:k]
        assert got.tolist() == order
        assert torch.equal(weight, own[order])


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf"), 0.0])
def test_e77_expert_ids_are_valid_for_every_row(value: float) -> None:
    """A row of NaN, infinities or equal values beside good ones, which it leaves alone."""
    h = normal(4, 64)
    want = run_moe(h, packed=True)
    h[2] = value
    got = run_moe(h, packed=True)
    others = [0, 1, 3]
    assert torch.equal(got[others], want[others])
    assert got[2].isnan().all() == (value != 0.0)
    w = _plain_moe()
    ids, _, _ = moe_reference.route(h, w)
    assert ((ids >= 0) & (ids < 8)).all()
    assert all(len(set(row)) == 2 for row in ids.tolist())


def test_e82_a_second_launch_and_a_zero_block_are_like_the_first() -> None:
    h = normal(3, 64)
    first = run_moe(h, packed=True)
    zeros = run_moe(torch.zeros(3, 64), packed=True)
    assert torch.isfinite(zeros).all()
    assert torch.equal(run_moe(h, packed=True), first)


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_e85_a_pruned_head_proposes_only_its_ids(rows: int) -> None:
    """Also where the request favours ids that the head does not hold; the tokens stay the same."""
    eng = engine()
    ids = prompt(12)
    for more in ({"temperature": 0}, {"temperature": 1.2, "seed": 3, "logit_bias": {400: 5.0}}):
        base = {**more, "max_tokens": 12, "ignore_eos": True}
        plain = generate(eng, ids, SamplingParams(**base))
        eng.add("r", ids, SamplingParams(**base, draft=Draft("mtp", 4, head_rows=rows)))
        tokens: list[int] = []
        while eng.has_work():
            for output in eng.step():
                tokens += output.token_ids
            if "r" in eng._running:
                assert all(0 <= draft < rows for draft in eng._running["r"].drafts)
        assert tokens == plain


def test_e09_padded_rows_write_to_the_null_slot_alone() -> None:
    """A dummy round, as a warm-up would run it, in the middle of a request."""
    eng = engine()
    ids = prompt(22)
    plain = generate(eng, ids, GREEDY)
    state = eng.model.state
    dummy = Sampler(GREEDY, make_processors(GREEDY, [1], [], VOCAB), 0, VOCAB)
    eng.add("r", ids, SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, draft=Draft("mtp", 3)
    ))  # fmt: skip
    tokens: list[int] = []
    parts = (state.S, state.ring_k, state.ring_u, state.ring_g, state.conv, state.k, state.v)
    while eng.has_work():
        for output in eng.step():
            tokens += output.token_ids
        before = [part[:, : state.null_slot].clone() for part in parts]
        with torch.inference_mode():
            run_round(eng.model, [Lane(state.null_slot, 3, 7, dummy, [1, 2, 3])] * 2)
        for part, old in zip(parts, before, strict=True):
            assert torch.equal(part[:, : state.null_slot], old)
    assert tokens == plain
    assert state.S[:, state.null_slot].abs().max() > 0 or state.ring_k[:, -1].abs().max() > 0


def test_e74_e76_state_gates_norms_and_router_are_fp32() -> None:
    """Also where the weights are bf16; and what a chunk leaves keeps fp32's range."""
    eng = load_engine("vk-tiny", max_model_len=64, threads=1)
    state: State = eng.model.state
    kept = (state.S, state.ring_k, state.ring_u, state.ring_g, state.conv)
    assert {part.dtype for part in kept} == {torch.float32}
    for layer in eng.model.weights.layers:
        assert layer.mixer.norm.dtype == layer.ffn.norm.dtype == torch.float32
        if isinstance(layer.mixer, GdnWeights):
            mixer = layer.mixer
            assert {mixer.a_log.dtype, mixer.dt_bias.dtype, mixer.gate_norm.dtype} == {
                torch.float32
            }
    route = moe_reference.route(normal(2, 64), _plain_moe())
    assert route[1].dtype == torch.float32
    # Sums beyond the range of fp16, and differences below its step, across the border of a chunk.
    k = torch.nn.functional.normalize(normal(1, 8, 16), dim=-1)
    s = torch.full((1, 16, 4), 3e5) + normal(1, 16, 4, seed=5) * 1e-1
    log_decay, beta = torch.zeros(1, 8), torch.zeros(1, 8)
    _, u = delta_rule(k, k, normal(1, 8, 4), log_decay, beta, s)
    assert torch.equal(state_after(s, k, u, log_decay, 8), s)


def test_the_number_of_threads_is_the_engines_own() -> None:
    """Rows are proven independent at one number of threads, so another one may not slip in."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        eng = load_engine(str(checkpoint()), max_model_len=64)
        torch.set_num_threads(2)
        generate(eng, prompt(3), SamplingParams(temperature=0, max_tokens=1))
        assert torch.get_num_threads() == eng.settings()["threads"] == 1
    finally:
        torch.set_num_threads(before)


def test_e86_e90_the_benchmark_fits_what_drafts_cost() -> None:
    costs = round_costs({0: 2000.0, 1: 2700.0, 2: 3100.0, 3: 3500.0})
    assert costs is not None
    assert (costs.base_us, costs.fixed_us, costs.slope_us) == pytest.approx((2000, 300, 400))
    assert costs.multiplier == pytest.approx({1: 1.35, 2: 1.55, 3: 1.75})
    assert "2000 us + 300 us with drafts + 400 us a draft; k=1 1.35x" in str(costs)
    assert round_costs({0: 2000.0, 3: 3500.0}) is None
    assert round_costs({1: 2700.0, 2: 3100.0}) is None


def test_e93_the_benchmark_prints_bytes_a_second_beside_microseconds() -> None:
    part = {
        "label": "gate_up 8 pairs",
        "count": 40,
        "us": 400.0,
        "adds_us": 380.0,
        "bytes": 1_340_000_000,
        "tb_s": 3.526,
        "us_each": 10.0,
        "adds_each": 9.5,
    }
    row = {
        "k": 0,
        "step_us": 2000.0,
        "tokens_per_round": 1.0,
        "tok_s": 500.0,
        "kernels": 254,
        "tb_s": 3.1,
        "profile": [part],
    }
    text = render(
        {
            "model": "m",
            "layers": 40,
            "device": "a card",
            "experts_per_token": 8,
            "costs": None,
            "rounds": [row],
        }
    )
    assert "adds    9.50 us" in text
    assert "3.53 TB/s" in text
