"""Tokens with drafts against tokens without, bit by bit, at true width on one GPU, as JSON lines.

    python tests/gpu/equality.py MODEL --layers 8 --prompts 200 --tokens 256 --depths 1,2,3,4,5

Prompts go in four lanes through captured rounds. All settings start from the same prefilled state.
`oracle`: the drafts are the true tokens with the first wrong one at each place in turn, so every
accept length occurs; nothing is read back in between, the record of each round is judged after.
`mtp`: the module's own drafts, which random weights seldom make right. `alone`: one lane by itself.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import torch
from vkengine.checkpoint import random_model
from vkengine.config import KNOWN_SHAPES
from vkengine.gpu_prefill import Prefill
from vkengine.graph import Round
from vkengine.lanes import WIDTH, Lanes
from vkengine.rows import Workspace
from vkengine.state import State

CUDA = torch.device("cuda")
#: What a prompt leaves in a slot beside the caches, which hold it by position.
PARTS = ("conv", "S", "ring_k", "ring_u", "ring_g")
MARGIN = 8


class Subject:
    """One model, four slots, and rounds by (lanes, depth, whether the module drafts)."""

    def __init__(self, model: str, layers: int | None, lanes: int, tokens: int) -> None:
        config = KNOWN_SHAPES[model]
        if layers is not None:
            config = replace(config, num_layers=layers, layer_types=config.layer_types[:layers])
        max_len = -(-(128 + 8 * tokens) // 16) * 16
        self.weights = random_model(config, 0, CUDA, torch.bfloat16, max_len + 64)
        self.state = State(config, lanes, max_len, CUDA, torch.bfloat16, True)
        self.lanes = Lanes.make(lanes, lanes, CUDA)
        self.ws = Workspace(CUDA)
        self.prefill = Prefill(self.weights, self.state, self.ws)
        self.rounds: dict[tuple[int, int, bool], Round] = {}
        self.prompts: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []

    def round(self, batch: int, k: int, mtp: bool) -> Round:
        key = (batch, k, mtp)
        if key not in self.rounds:
            lanes = self.lanes if batch == self.lanes.slot.shape[0] else self.lanes.first(batch)
            self.rounds[key] = Round(self.weights, self.state, lanes, self.ws, k, mtp=mtp)
            self.rounds[key].capture()
        return self.rounds[key]

    def load(self, first: int) -> None:
        """Prompts ``first`` and following into the slots."""
        self.prompts = []
        for lane in range(self.lanes.slot.shape[0]):
            number = first + lane
            generator = torch.Generator().manual_seed(number)
            length = 8 + number * 7 % 96
            ids = torch.randint(0, 30000, (length + WIDTH,), generator=generator)
            self.prompts.append(ids[:length])
            self.state.reset(lane)
            on = ids.to(CUDA, torch.int32)
            self.prefill.prompt(lane, on, 0, length - 1)
        self.kept = [getattr(self.state, name).clone() for name in PARTS]

    def start(self, first: int, temperature: float) -> None:
        for name, old in zip(PARTS, self.kept, strict=True):
            getattr(self.state, name).copy_(old)
        for lane, ids in enumerate(self.prompts):
            at = len(ids) - 1
            self.state.folded[lane] = at
            seed = 977 * (first + lane) + 5
            self.lanes.join(lane, lane, int(ids[-1]), at, seed=seed, temperature=temperature)

    def records(self, one: Round, rounds: int) -> torch.Tensor:
        log = torch.zeros(rounds, one.batch, WIDTH, dtype=torch.int32, device=CUDA)
        for t in range(rounds):
            one.replay()
            log[t].copy_(one.lanes.record[: one.batch])
        return log.cpu()

    def free(self, one: Round, count: int) -> list[list[int]]:
        """At least ``count`` tokens a lane, whatever the drafts are."""
        out: list[list[int]] = [[] for _ in range(one.batch)]
        while (missing := count - min(map(len, out))) > 0:
            for rows in self.records(one, min(missing, 64)).tolist():
                for tokens, row in zip(out, rows, strict=True):
                    tokens += row[: row[-1]]
        return [tokens[:count] for tokens in out]

    def forced(self, one: Round, truth: list[list[int]], count: int) -> tuple[int, int]:
        """(lanes whose every round was right, rounds) under drafts with forced accept lengths."""
        k, vocab = one.k, self.weights.config.vocab_size
        starts, at = [], 0
        while at < count:
            starts.append(at)
            at += (len(starts) - 1) % (k + 1) + 1
        right = [t % (k + 1) for t in range(len(starts))]
        drafts = torch.tensor(
            [
                [
                    [x if i < n else (x + 1) % vocab for i, x in enumerate(lane[s : s + k])]
                    for lane in truth
                ]
                for s, n in zip(starts, right, strict=True)
            ],
            dtype=torch.int32,
        ).to(CUDA)
        log = torch.zeros(len(starts), one.batch, WIDTH, dtype=torch.int32, device=CUDA)
        for t in range(len(starts)):
            one.lanes.tokens[:, 1 : 1 + k].copy_(drafts[t])
            one.lanes.limit.fill_(k)
            one.replay()
            log[t].copy_(one.lanes.record)
        rows = log.cpu().tolist()
        good = 0
        for lane, tokens in enumerate(truth):
            good += all(
                rows[t][lane][-1] == n + 1 and rows[t][lane][: n + 1] == tokens[s : s + n + 1]
                for t, (s, n) in enumerate(zip(starts, right, strict=True))
            )
        return good, len(starts)


def say(**row: object) -> None:
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--depths", default="1,2,3,4,5")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--alone", type=int, default=8, help="prompts that also run alone")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no prompts after this")
    a = parser.parse_args()
    began = time.monotonic()
    depths = [int(x) for x in a.depths.split(",")]
    temperatures = [float(x) for x in a.temperatures.split(",")]
    with torch.inference_mode():
        subject = Subject(a.model, a.layers, a.lanes, a.tokens)
        say(event="built", seconds=round(time.monotonic() - began, 1))
        good: dict[str, int] = {}
        seen: dict[str, int] = {}
        distinct = rounds = 0
        for first in range(0, a.prompts, a.lanes):
            if time.monotonic() - began > a.seconds:
                break
            subject.load(first)
            for temperature in temperatures:
                subject.start(first, temperature)
                plain = subject.round(a.lanes, 0, False)
                truth = subject.free(plain, a.tokens + MARGIN)
                distinct += sum(len(set(tokens[: a.tokens])) for tokens in truth)
                settings: list[tuple[str, int]] = [("oracle", k) for k in depths]
                settings += [("mtp", k) for k in depths]
                for kind, k in settings:
                    name = f"{kind} k={k} T={temperature:g}"
                    one = subject.round(a.lanes, k, kind == "mtp")
                    subject.start(first, temperature)
                    if kind == "oracle":
                        same, count = subject.forced(one, truth, a.tokens)
                        rounds += count
                    else:
                        got = subject.free(one, a.tokens)
                        same = sum(x == y[: a.tokens] for x, y in zip(got, truth, strict=True))
                    good[name] = good.get(name, 0) + same
                    seen[name] = seen.get(name, 0) + a.lanes
                if first < a.alone:
                    name = f"alone T={temperature:g}"
                    subject.start(first, temperature)
                    got = subject.free(subject.round(1, 0, False), a.tokens)
                    good[name] = good.get(name, 0) + (got[0] == truth[0][: a.tokens])
                    seen[name] = seen.get(name, 0) + 1
            if first % 40 == 0:
                say(event="so far", prompts=first + a.lanes, equal=good == seen,
                    seconds=round(time.monotonic() - began, 1))  # fmt: skip
    for name, count in seen.items():
        say(setting=name, prompts=count, equal=good[name])
    total = max(1, sum(n for name, n in seen.items() if "oracle k=1 " in name)) * a.tokens
    say(event="done", model=a.model, layers=a.layers, tokens=a.tokens, equal=good == seen,
        distinct_share=round(distinct / total, 3), forced_rounds=rounds,
        seconds=round(time.monotonic() - began, 1))  # fmt: skip
    raise SystemExit(0 if good == seen else 1)


if __name__ == "__main__":
    main()
