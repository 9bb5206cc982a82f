"""Thousands of rounds with random acceptance, aborts, joins and leaves: output is plain decode."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from qwen import VOCAB, engine, generate, prompt
from vkengine.draft.oracle import Oracle
from vkengine.output import EngineFull
from vkengine.sampling import Draft, SamplingParams

LENGTH = 60


def params(kind: int, draft: Draft) -> SamplingParams:
    if kind % 2:
        return SamplingParams(
            temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=kind,
            max_tokens=LENGTH, ignore_eos=True, draft=draft,
        )  # fmt: skip
    return SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, draft=draft)


class Truths:
    """Plain decodes of a few prompts, made once."""

    def __init__(self) -> None:
        eng = engine()
        self.ids = [prompt(3 + 17 * i, seed=i) for i in range(6)]
        self.tokens = [generate(eng, ids, params(i, Draft())) for i, ids in enumerate(self.ids)]


TRUTHS: list[Truths] = []


def truths() -> Truths:
    if not TRUTHS:
        TRUTHS.append(Truths())
    return TRUTHS[0]


class Run:
    """An engine, what each running request should give, and what it gave so far."""

    def __init__(self) -> None:
        self.eng = engine(max_sequences=4)
        self.got: dict[str, list[int]] = {}
        self.job: dict[str, int] = {}
        self.count = 0
        self.rounds = 0

    def join(self, job: int, method: str, k: int, seed: int) -> None:
        name = f"r{self.count}"
        self.count += 1
        if method == "oracle":
            rng = random.Random(seed)
            plan = lambda r: (rng.randint(0, k), rng.randint(0, k))  # noqa: E731
            self.eng.oracles[name] = Oracle(truths().tokens[job], plan, VOCAB)
        draft = Draft(method, k) if method != "none" else Draft()
        try:
            self.eng.add(name, truths().ids[job], params(job, draft))
        except EngineFull:
            assert len(self.eng._running) == 4
            self.eng.oracles.pop(name, None)
            return
        self.got[name], self.job[name] = [], job

    def step(self) -> None:
        for output in self.eng.step():
            name = output.request_id
            self.rounds += 1
            assert output.error is None
            self.got[name] += output.token_ids
            want = truths().tokens[self.job[name]]
            assert self.got[name] == want[: len(self.got[name])], name
            if output.finish_reason:
                assert self.got.pop(name) == want
                del self.job[name]

    def leave(self, index: int) -> None:
        if self.got:
            name = sorted(self.got)[index % len(self.got)]
            self.eng.abort(name)
            del self.got[name], self.job[name]

    def check(self) -> None:
        assert set(self.eng._running) == set(self.got)
        slots = [s.slot for s in self.eng._running.values()] + self.eng._free
        assert sorted(slots) == [0, 1, 2, 3]
        assert not self.eng.oracles


class Machine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.run = Run()

    @rule(
        job=st.integers(0, 5),
        method=st.sampled_from(["none", "mtp", "ngram", "oracle"]),
        k=st.integers(1, 8),
        seed=st.integers(0, 99),
    )
    def join(self, job: int, method: str, k: int, seed: int) -> None:
        self.run.join(job, method, k, seed)

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.run.step()

    @rule(index=st.integers(0, 3))
    def leave(self, index: int) -> None:
        self.run.leave(index)

    @invariant()
    def nothing_leaks(self) -> None:
        self.run.check()


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def test_state_machine_short() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=4,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_e16_five_thousand_rounds() -> None:
    rng = random.Random(1)
    run = Run()
    while run.rounds < 5000:
        move = rng.random()
        if move < 0.25:
            method = rng.choice(["none", "mtp", "ngram", "oracle", "oracle"])
            run.join(rng.randrange(6), method, rng.randint(1, 8), rng.randrange(1000))
        elif move < 0.28:
            run.leave(rng.randrange(4))
        else:
            run.step()
        run.check()
    for slot in range(4):
        assert run.eng.model.state.is_finite(slot)
    assert float(run.eng.model.state.S.abs().max()) < 1e3
