"""Which rounds the GPU engine launches ahead, with a device that is played by the test.

Tokens are a function of (prompt, position); a graph's record may be read only after its event.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from qwen import engine as cpu_engine
from vkengine import gpu_flights
from vkengine.gpu_engine import GpuEngine
from vkengine.gpu_prefill import Prefill
from vkengine.graph import Round
from vkengine.lanes import TURNS, WIDTH
from vkengine.sampling import Draft, SamplingParams

GRAPHS: list[str] = []


def truth(seed: int, pos: int) -> int:
    return (seed * 31 + pos * 7) % 400 + 5


class Event:
    """Nothing lands before it is waited for: until then the records hold what cannot be a token."""

    def record(self) -> None:
        self.at = len(PENDING)

    def synchronize(self) -> None:
        for record, rows in PENDING[: self.at]:
            record.copy_(rows)


PENDING: list[tuple[torch.Tensor, torch.Tensor]] = []


def replay(self: Round, part: str = "run") -> None:
    GRAPHS.append(part)
    lanes = self.lanes
    for _ in range(2 if part == "twice" else 1):
        lanes.pos.copy_(lanes.next_pos)
        lanes.turn += 1
        rows = torch.full((self.batch, WIDTH), -1, dtype=torch.int32)
        for b in range(self.batch):
            rows[b, 0] = truth(int(lanes.seed[b, 0]), int(lanes.pos[b]) + 1)
            rows[b, WIDTH - 1] = 1
        lanes.next_pos += 1
        PENDING.append((lanes.host[int(lanes.turn) % TURNS], rows))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> GpuEngine:
    GRAPHS.clear()
    PENDING.clear()
    monkeypatch.setattr(Prefill, "warm", lambda self: None)
    monkeypatch.setattr(Prefill, "prompt", lambda self, *where: None)
    monkeypatch.setattr(Round, "replay", replay)
    monkeypatch.setattr(
        gpu_flights,
        "torch",
        SimpleNamespace(cuda=SimpleNamespace(Event=Event), Tensor=torch.Tensor),
    )
    model = cpu_engine(max_sequences=4, max_len=64).model
    return GpuEngine(model, capture=(), profile="vkae", weights="random:0", default_draft=Draft())


def params(count: int, seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, seed=seed, ignore_eos=True, **more)


def drain(engine: GpuEngine, out: dict[str, list[int]], steps: int = 1000) -> None:
    while engine.has_work() and steps:
        steps -= 1
        for output in engine.step():
            assert output.error is None
            out.setdefault(output.request_id, []).extend(output.token_ids)


def wanted(seed: int, prompt: int, count: int) -> list[int]:
    return [truth(seed, prompt + i) for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 17])
def test_pairs_give_every_token_once_and_stop_in_time(engine: GpuEngine, count: int) -> None:
    engine.add("a", [1, 2, 3], params(count, 5))
    out: dict[str, list[int]] = {}
    drain(engine, out)
    assert out["a"] == wanted(5, 3, count)
    assert GRAPHS[0] == "run", "the first token waits for no second round"
    assert ("twice" in GRAPHS) == (count > 3)
    rounds = sum(2 if part == "twice" else 1 for part in GRAPHS)
    assert rounds == count


def test_a_request_at_the_end_of_the_cache_stays_inside(engine: GpuEngine) -> None:
    engine.add("a", list(range(1, 42)), params(50, 5))
    out: dict[str, list[int]] = {}
    drain(engine, out)
    assert out["a"] == wanted(5, 41, 23)
    assert int(engine.lanes.next_pos.max()) <= 64


def test_requests_that_come_and_go_between_pairs_keep_their_tokens(engine: GpuEngine) -> None:
    out: dict[str, list[int]] = {}
    engine.add("a", [1, 2, 3], params(30, 5))
    drain(engine, out, 4)
    engine.add("b", [4, 5], params(6, 6))
    drain(engine, out, 3)
    engine.abort("a")
    engine.add("c", [7], params(9, 7))
    drain(engine, out)
    assert out["a"] == wanted(5, 3, len(out["a"])) and len(out["a"]) < 30
    assert out["b"] == wanted(6, 2, 6)
    assert out["c"] == wanted(7, 1, 9)
    assert "twice" in GRAPHS


def test_a_stop_in_the_first_of_two_rounds_ends_the_request(engine: GpuEngine) -> None:
    stop = truth(5, 3 + 4)
    engine.add("a", [1, 2, 3], params(30, 5, stop_token_ids=(stop,)))
    out: dict[str, list[int]] = {}
    drain(engine, out)
    assert out["a"] == wanted(5, 3, 5)


def test_no_pairs_where_a_request_drafts(engine: GpuEngine) -> None:
    engine.add("a", [1, 2, 3], params(30, 5))
    for _ in range(3):
        engine.step()
    assert engine._pair(engine._current())
    engine.lane[0].draft = Draft("mtp", "auto")  # of depth 0 for now
    assert not engine._pair(engine._round(1, 0, False, None))
