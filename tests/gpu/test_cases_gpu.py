"""Faults that others ran into and that only a captured graph or a GPU can show, by their ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from kernel_shapes import Make, close
from torch import Tensor
from vkengine.checkpoint import random_model
from vkengine.config import KNOWN_SHAPES, ModelConfig
from vkengine.gpu_engine import GpuEngine
from vkengine.gpu_prefill import Prefill
from vkengine.graph import Round
from vkengine.lanes import WIDTH, Lanes
from vkengine.models.layout import ModelWeights
from vkengine.ops.moe import grouped
from vkengine.ops.moe import reference as moe_reference
from vkengine.ops.moe import triton as moe_kernels
from vkengine.ops.norm import rms_norm
from vkengine.rows import Workspace
from vkengine.sampling import Draft, SamplingParams
from vkengine.state import State, cache_length
from vkengine.step import Model

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPE = torch.bfloat16
MAX_LEN = 1008
#: Contexts of the needle's test; with 40 tokens of room each has another length of a split.
CONTEXTS = (2500, 8000, 16000)
ROOM = 40
ROUNDS = 6


def shape() -> ModelConfig:
    layers = ("gdn", "gdn", "gdn", "attention")
    return replace(KNOWN_SHAPES["qwen35-35b-a3b"], num_layers=len(layers), layer_types=layers)


@pytest.fixture(scope="module")
def weights() -> ModelWeights:
    return random_model(shape(), 0, CUDA, DTYPE, cache_length(max(CONTEXTS) + ROOM))


class Watched(dict[Any, Any]):
    """A workspace's buffers, none of which may be made while a graph is captured."""

    def __setitem__(self, key: Any, value: Any) -> None:
        assert not torch.cuda.is_current_stream_capturing(), f"{key} is made within a capture"
        super().__setitem__(key, value)


class Setup:
    """State, lanes and rounds of ``batch`` sequences."""

    def __init__(self, weights: ModelWeights, batch: int = 1, max_len: int = MAX_LEN) -> None:
        self.weights = weights
        self.state = State(weights.config, batch, max_len, CUDA, DTYPE, True)
        self.lanes = Lanes.make(batch, batch, CUDA)
        self.ws = Workspace(CUDA, Watched())

    def round(self, k: int) -> Round:
        return Round(self.weights, self.state, self.lanes, self.ws, k)

    def start(self, lane: int, prompt: Tensor, **how: Any) -> None:
        """All of ``prompt`` but its last token into the state; the round runs that one."""
        n = len(prompt) - 1
        self.state.reset(lane)
        padded = torch.cat((prompt, torch.zeros(WIDTH, dtype=torch.int32, device=CUDA)))
        Prefill(self.weights, self.state, self.ws).prompt(lane, padded, 0, n)
        self.lanes.join(lane, lane, int(prompt[n]), n, **how)

    def rounds(self, one: Round, graph: bool, count: int = ROUNDS) -> tuple[list[Any], Tensor]:
        """The records of some rounds, and their logits."""
        tokens, logits = [], []
        for _ in range(count):
            if graph:
                one.replay()
            else:
                one.run()
            row = one.lanes.record.tolist()
            tokens.append([lane[: lane[-1]] for lane in row])
            logits.append(one.logits.clone())
        return tokens, torch.stack(logits)


def text(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + n)
    top = min(30000, shape().vocab_size)
    return torch.randint(1, top, (n,), generator=generator).to(CUDA, torch.int32)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("context", CONTEXTS)
def test_e18_needle_far_back_graph_equals_eager(
    weights: ModelWeights, context: int, k: int
) -> None:
    plain = text(context + 1)
    planted = plain.clone()
    at = context // 25
    planted[at : at + 8] = text(8, seed=1)
    results = []
    for prompt in (plain, planted):
        outcome = []
        for graph in (False, True):
            setup = Setup(weights, max_len=context + ROOM)
            one = setup.round(k)
            if graph:
                one.capture()
            setup.start(0, prompt)
            outcome.append(setup.rounds(one, graph))
        (tokens, logits), (graph_tokens, graph_logits) = outcome
        assert graph_tokens == tokens
        assert torch.equal(graph_logits, logits)
        assert torch.isfinite(logits).all()
        results.append(logits)
    # The first round's first row: before any token of the two could differ.
    assert not torch.equal(results[0][0][0], results[1][0][0]), "the needle was not seen"


def described(tensors: dict[Any, Tensor]) -> dict[Any, tuple[Any, ...]]:
    return {
        name: (t.data_ptr(), tuple(t.shape), t.stride(), t.dtype) for name, t in tensors.items()
    }


def read_by(one: Round) -> dict[Any, Tensor]:
    """Every tensor outside the weights that a replay of ``one`` reads or writes."""
    found: dict[Any, Tensor] = {f.name: getattr(one.lanes, f.name) for f in fields(one.lanes)}
    found |= {f"state.{n}": t for n, t in vars(one.state).items() if isinstance(t, Tensor)}
    return found | {("ws", *key): t for key, t in one.ws.buffers.items()}


def test_e20_what_a_replay_reads_stays_where_and_as_it_was(weights: ModelWeights) -> None:
    """A replay takes no tensors, so none can come with another stride; what it was captured with
    is neither moved nor replaced by joins, leaves, prompts and other rounds."""
    setup = Setup(weights, 2)
    one = setup.round(3)
    one.capture()
    before = described(read_by(one))
    assert {"tokens", "state.k", "state.S"} <= set(before)
    assert len(before) > 30
    setup.start(0, text(40))
    setup.start(1, text(70), temperature=0.8, seed=3)
    setup.rounds(one, True)
    other = setup.round(0)
    other.capture()
    setup.rounds(other, True)
    setup.lanes.leave(1, setup.state.null_slot)
    setup.state.reset(1)
    setup.start(1, text(50), banned=(5, 6), ban_until=60)
    setup.rounds(one, True)
    after = described(read_by(one))
    assert {name: after.get(name) for name in before} == before


def test_e26_nothing_is_made_in_a_capture_and_allocations_change_nothing(
    weights: ModelWeights,
) -> None:
    """``Watched`` fails a capture that makes a buffer, for every part."""
    setup = Setup(weights)
    one = setup.round(3)
    for part in ("verify", "finish", "run"):
        one.capture(part)
    made = len(setup.ws.buffers)
    prompt = text(100)
    setup.start(0, prompt)
    want, want_logits = setup.rounds(one, True)
    setup.start(0, prompt)
    got, logits = [], []
    for i in range(ROUNDS):
        # Whatever memory is free now holds NaN when the graph runs.
        sizes = (2**28, 2**20, 2**14, 2**8) if CUDA.type == "cuda" else (2**8,)
        junk = [torch.full((n + i,), float("nan"), device=CUDA) for n in sizes]
        if i % 2:
            del junk
        new, row = setup.rounds(one, True, 1)
        got += new
        logits.append(row)
    assert got == want
    assert torch.equal(torch.cat(logits), want_logits)
    grown = [key for key in list(setup.ws.buffers)[made:] if key[0] != "gain"]
    assert not grown, "replays need buffers of their own"


def test_e28_a_lane_holds_nothing_of_the_request_before(weights: ModelWeights) -> None:
    prompt = text(60)
    clean = Setup(weights)
    one = clean.round(3)
    one.capture()
    clean.start(0, prompt)
    joined = {f.name: getattr(clean.lanes, f.name).clone() for f in fields(Lanes)}
    want = clean.rounds(one, True)
    for poison in (False, True):
        used = Setup(weights)
        again = used.round(3)
        again.capture()
        used.start(
            0,
            text(90),
            seed=1 << 40,
            choice=3,
            temperature=1.5,
            acceptance=0.9,
            cap=1,
            banned=(int(want[0][0][0][0]), 2, 3),
            ban_until=10**6,
        )
        used.rounds(again, True)
        used.lanes.leave(0, used.state.null_slot)
        if poison:
            # What a round reads before it writes must all come from the join.
            kept = {"turn", "host"}
            for f in fields(Lanes):
                if f.name not in kept:
                    getattr(used.lanes, f.name).fill_(77)
        used.start(0, prompt)
        # A round begins by setting ``pos``, and ends with these others.
        within = {"pos", "record", "row", "chain_pos", "turn", "host"}
        for name in sorted(set(joined) - within):
            assert torch.equal(getattr(used.lanes, name), joined[name]), name
        got = used.rounds(again, True)
        assert got[0] == want[0]
        assert torch.equal(got[1], want[1])


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Every capture made, as (round, part)."""
    made: list[tuple[int, str]] = []
    original = Round.capture

    def capture(self: Round, part: str = "run") -> None:
        made.append((id(self), part))
        original(self, part)

    monkeypatch.setattr(Round, "capture", capture)
    return made


@pytest.fixture
def engine(weights: ModelWeights, captures: list[tuple[int, str]]) -> Iterator[GpuEngine]:
    """Two sequences at most; ``captures`` counts from here on."""
    with torch.inference_mode():
        state = State(weights.config, 2, MAX_LEN, CUDA, DTYPE, mtp=True)
        model = Model(weights, state, Workspace(CUDA, Watched()))
        made = GpuEngine(
            model, capture=(0, 3), profile="vkae", weights="random:0", default_draft=Draft()
        )
    yield made
    made.close()


def drive(engine: GpuEngine, requests: list[SamplingParams]) -> list[list[int]]:
    """Requests in order, each as soon as there is a slot; the tokens of each."""
    out: list[list[int]] = [[] for _ in requests]
    waiting = list(enumerate(requests))
    for _ in range(10_000):
        while waiting and len(engine._running) < engine.max_sequences:
            i, params = waiting.pop(0)
            engine.add(str(i), text(20 + i).tolist(), params)
        if not engine.has_work():
            return out
        for output in engine.step():
            assert output.error is None, output.error
            out[int(output.request_id)] += output.token_ids
    raise AssertionError("the requests do not end")


def check_captures(
    engine: GpuEngine, captures: list[tuple[int, str]], requests: list[SamplingParams], most: int
) -> None:
    """Keys hold shapes alone, each is captured once, and a second pass captures nothing."""
    first = drive(engine, requests)
    assert all(len(t) == p.max_tokens for t, p in zip(first, requests, strict=True))
    assert len(set(captures)) == len(captures), "a round was captured twice"
    assert len(engine.rounds) <= most, sorted(engine.rounds, key=str)
    for batch, k, mtp, head_rows in engine.rounds:
        assert batch in (1, 2)
        assert k in (0, 3)
        assert mtp == (k > 0)
        assert head_rows in (4096, 32768)
    count, rounds = len(captures), len(engine.rounds)
    for _ in range(3):
        assert drive(engine, requests) == first
    assert len(captures) == count, "captures went on"
    assert len(engine.rounds) == rounds


def test_e29_rounds_are_keyed_by_shape_and_captured_once(
    engine: GpuEngine, captures: list[tuple[int, str]]
) -> None:
    drafts = [Draft(), Draft("mtp", 3), Draft("mtp", 3, head_rows=4096)]
    requests = [
        SamplingParams(
            max_tokens=12 + i, temperature=(0.0, 0.9)[i % 2], seed=i, ignore_eos=True, draft=d
        )
        for i, d in enumerate(drafts * 6)
    ]
    # Batches 1 and 2, k of 0 (where no drafter's head matters) and 3 with two heads.
    check_captures(engine, captures, requests, most=8)


def test_e29_guided_rounds_too(engine: GpuEngine, captures: list[tuple[int, str]]) -> None:
    """Requests that the host has a part in: verify and finish as graphs of their own."""
    requests = [
        SamplingParams(
            max_tokens=6,
            temperature=0.9,
            top_k=(20, 0)[i % 2],
            seed=i,
            ignore_eos=True,
            draft=(Draft(), Draft("mtp", 3))[i // 2 % 2],
        )
        for i in range(8)
    ]
    check_captures(engine, captures, requests, most=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("top", [1, 4, 8])
def test_e94_experts_for_every_number_of_them(top: int, dtype: torch.dtype) -> None:
    config = replace(shape(), experts_per_token=top)
    t = Make(config, CUDA.type, dtype)
    w = t.moe()
    drawn = t.normal(512, config.hidden_size)
    logits = rms_norm(drawn, w.norm, config.rms_eps) @ w.router[: config.num_experts].float().T
    order = logits.topk(top + 1).values
    # Where the last chosen one is nearly tied, kernels and reference may rightly differ.
    h = drawn[order[:, -2] - order[:, -1] > 0.02][:128].contiguous()
    assert len(h) == 128
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-4
    for m in (1, 4):
        want, got = h[:m].clone(), h[:m].clone()
        moe_reference.moe(want, w, None, None, Workspace(CUDA))
        moe_kernels.moe(got, w, None, None, Workspace(CUDA))  # type: ignore[arg-type]
        close(got - h[:m], want - h[:m], limit)
    want, got = h.clone(), h.clone()
    moe_reference.moe_unit(want, w)
    grouped.moe(got, w, len(h))
    close(got - h, want - h, limit)
