"""A few layers of true width through whole rounds: graphs, drafts, lanes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vkengine.bench import recorded
from vkengine.checkpoint import random_model
from vkengine.config import KNOWN_SHAPES
from vkengine.graph import Round
from vkengine.lanes import Lanes
from vkengine.models.layout import ModelWeights
from vkengine.rows import Workspace
from vkengine.state import State

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
MAX_LEN = 1008
TOKENS = 96


@pytest.fixture(scope="module")
def weights() -> ModelWeights:
    config = replace(
        KNOWN_SHAPES["qwen35-35b-a3b"],
        num_layers=4,
        layer_types=("gdn", "gdn", "gdn", "attention"),
    )
    return random_model(config, 0, CUDA, torch.bfloat16, MAX_LEN + 64)


class Driver:
    """Greedy or sampled tokens of ``lanes`` sequences from one-token prompts."""

    def __init__(self, weights: ModelWeights, batch: int) -> None:
        self.weights = weights
        self.state = State(weights.config, batch, MAX_LEN, CUDA, torch.bfloat16, True)
        self.lanes = Lanes.make(batch, batch, CUDA)
        self.ws = Workspace(CUDA)
        self.rounds: dict[int, Round] = {}

    def round(self, k: int) -> Round:
        if k not in self.rounds:
            self.rounds[k] = Round(self.weights, self.state, self.lanes, self.ws, k)
        return self.rounds[k]

    def start(
        self, prompts: list[int], temperature: float, acceptance: float | None = None
    ) -> None:
        for lane, token in enumerate(prompts):
            self.state.reset(lane)
            self.lanes.join(
                lane,
                lane,
                token,
                0,
                seed=1234 + token,
                temperature=temperature,
                acceptance=acceptance,
            )

    def step(self, k: int, graph: bool) -> list[list[int]]:
        one = self.round(k)
        if not graph:
            one.run()
        else:
            one.replay()
        torch.cuda.synchronize()
        host = self.lanes.record.tolist()
        return [row[: row[-1]] for row in host]

    def generate(
        self,
        prompts: list[int],
        k: int,
        temperature: float,
        *,
        graph: bool = False,
        oracle: list[list[int]] | None = None,
    ) -> tuple[list[list[int]], list[int]]:
        if graph and not self.round(k).graphs:
            self.round(k).capture()
        self.start(prompts, temperature)
        out: list[list[int]] = [[] for _ in prompts]
        counts = []
        turn = 0
        while min(len(tokens) for tokens in out) < TOKENS:
            if oracle is not None:
                right = turn % (k + 1)
                for lane, tokens in enumerate(out):
                    truth = oracle[lane][len(tokens) : len(tokens) + k]
                    drafts = [t if i < right else (t + 1) % 1000 for i, t in enumerate(truth)]
                    self.lanes.tokens[lane, 1 : 1 + len(drafts)] = torch.tensor(
                        drafts, dtype=torch.int32, device=CUDA
                    )
                    self.lanes.limit[lane] = len(drafts)
            for lane, new in enumerate(self.step(k, graph)):
                out[lane] += new
                counts.append(len(new))
            turn += 1
        return [tokens[:TOKENS] for tokens in out], counts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_do_not_depend_on_drafts_graphs_or_neighbours(
    weights: ModelWeights, temperature: float
) -> None:
    alone = Driver(weights, 1)
    want = [alone.generate([p], 0, temperature)[0][0] for p in (11, 500, 77)]
    assert len(set(want[0])) > TOKENS // 3, "the random model collapsed"
    longest = [alone.generate([p], 0, temperature)[0][0] for p in (11,)]
    assert longest[0] == want[0]
    for k in (1, 2, 3, 5):
        got, _ = alone.generate([11], k, temperature)
        assert got[0] == want[0], f"k={k}"
        got, counts = alone.generate([11], k, temperature, oracle=[want[0] + [0] * 16])
        assert got[0] == want[0], f"oracle k={k}"
        assert max(counts) == k + 1
    for k in (0, 3):
        got, _ = alone.generate([11], k, temperature, graph=True)
        assert got[0] == want[0], f"graph k={k}"
        junk = torch.empty(2**28, device=CUDA)
        del junk
        got, _ = alone.generate([500], k, temperature, graph=True)
        assert got[0] == want[1], f"graph again k={k}"
    several = Driver(weights, 4)
    for k in (0, 2):
        got, _ = several.generate([11, 500, 77, 3], k, temperature)
        assert got[:3] == want, f"beside others k={k}"
    # Two lanes idle on the null slot: the slots of nobody are left alone.
    pair = Driver(weights, 2)
    pair.state.k.zero_()
    pair.start([500], temperature)
    pair.lanes.leave(1, 2)
    tokens: list[int] = []
    while len(tokens) < TOKENS:
        tokens += pair.step(1, False)[0]
    assert tokens[:TOKENS] == want[1]
    assert not pair.state.k[:, 1].any()


def test_synthetic_acceptance_counts(weights: ModelWeights) -> None:
    one = Driver(weights, 1)
    one.start([5], 0.0, acceptance=0.8)
    counts = [len(one.step(3, False)[0]) for _ in range(200)][1:]
    mean = sum(counts) / len(counts)
    assert abs(mean - 2.952) < 0.35, mean


def test_synthetic_rounds_launch_what_compared_rounds_launch(weights: ModelWeights) -> None:
    """Acceptance is a number on the device: kernels and bytes are those of forced drafts."""
    one, seen = Driver(weights, 1), []
    for acceptance in (None, 0.8):
        one.start([5], 0.0, acceptance=acceptance)
        one.lanes.limit.fill_(3)
        with recorded() as launches:
            one.round(3).run()
        torch.cuda.synchronize()
        seen.append([(launch.label, launch.n_bytes) for launch in launches])
    assert seen[0] == seen[1] and len(seen[0]) > 4 * 6
