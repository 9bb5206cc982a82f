"""Sampler, accept and input kernels against torch, under the interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from vkengine.ops.accept.reference import accept
from vkengine.ops.sample.noise import gumbel, row_key
from vkengine.sampler import ACCEPTANCE_CHOICE, synthetic_acceptance

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="triton was imported without its interpreter"
)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def seeds(*pairs: tuple[int, int]) -> torch.Tensor:
    def i32(word: int) -> int:
        word &= 0xFFFFFFFF
        return word - (1 << 32) if word >> 31 else word

    rows = [[i32(seed), i32(seed >> 32), choice] for seed, choice in pairs]
    return torch.tensor(rows, dtype=torch.int32)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    m: int,
    ids: torch.Tensor | None = None,
    row: torch.Tensor | None = None,
    until: torch.Tensor | None = None,
) -> torch.Tensor:
    from vkengine.ops.head.triton import sample_kernel

    rows = len(temperature) * m
    v = logits.shape[1]
    parts = -(-v // 128)
    out = torch.full((len(temperature), 16), -7, dtype=torch.int32)
    value = torch.full((rows, parts), float("nan"))
    index = torch.full((rows, parts), -1, dtype=torch.int32)
    counter = torch.zeros(rows, dtype=torch.int32)
    sample_kernel[(parts, rows)](
        logits, ids if ids is not None else counter, row if row is not None else counter,
        temperature, seed, pos, torch.full((len(temperature), 4), 7, dtype=torch.int32),
        until if until is not None else torch.zeros(len(temperature), dtype=torch.int32),
        value, index, counter, out, v, 1, 16,
        M=m, HAS_IDS=ids is not None, HAS_ROW=row is not None, CHUNK=128, PARTS=parts, PP=4,
    )  # fmt: skip
    assert not counter.any()
    assert (out[:, m:] == -7).all()
    return out[:, :m]


def test_scores_are_those_of_the_reference() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 300)
    seed = seeds((2**63 + 12345, 0), (7, 3))
    pos = ints(100, 9000)
    got = sample(logits, torch.tensor([0.7, 1.3]), seed, pos, 2)
    every = torch.arange(300, dtype=torch.int32)
    for b, (key, choice, t) in enumerate(((2**63 + 12345, 0, 0.7), (7, 3, 1.3))):
        for j in range(2):
            noise = gumbel(row_key(key, choice, int(pos[b]) + 1 + j), every.clone())
            want = int((logits[2 * b + j] / t + noise).argmax())
            assert int(got[b, j]) == want


def test_greedy_ties_and_nan_rows() -> None:
    logits = torch.zeros(3, 300)
    logits[0, [7, 131, 299]] = 5.0
    logits[1] = float("nan")
    logits[2, 140] = float("inf")
    got = sample(logits, torch.zeros(3), seeds((1, 0), (1, 0), (1, 0)), ints(0, 0, 0), 1)
    assert got[0] == 7
    assert got[1] == -1
    assert got[2] == 140


def test_banned_ids_return_at_their_position() -> None:
    logits = torch.zeros(3, 300)
    logits[:, 7] = 9.0
    logits[:, 8] = 5.0
    got = sample(logits, torch.zeros(1), seeds((1, 0)), ints(20), 3, until=ints(22))
    assert got[0].tolist() == [8, 7, 7]


def test_pruned_head_draws_with_the_noise_of_the_real_ids() -> None:
    torch.manual_seed(1)
    ids = torch.arange(0, 1000, 5, dtype=torch.int32)
    logits = torch.randn(3, 200)
    seed = seeds((99, 0))
    got = sample(logits, torch.tensor([1.0]), seed, ints(5), 1, ids, ints(2))
    noise = gumbel(row_key(99, 0, 6), ids.clone())
    assert int(got[0, 0]) == int(ids[(logits[2] + noise).argmax()])


@pytest.mark.parametrize("synthetic", [None, 0.6])
def test_accept(synthetic: float | None) -> None:
    from vkengine.ops.accept.triton import accept_kernel

    b, m = 5, 4
    tokens = torch.full((b, 16), 1000, dtype=torch.int32)
    y = torch.arange(b * m, dtype=torch.int32).reshape(b, m)
    for lane in range(b):  # lane n agrees in exactly n drafts, lane 4 beyond its limit
        tokens[lane, 1 : 1 + min(lane, 3)] = y[lane, : min(lane, 3)]
    limit = ints(3, 3, 3, 3, 1)
    before = tokens.clone()
    chance = torch.full((b,), -1.0 if synthetic is None else synthetic)
    pos = ints(10, 20, 30, 40, 50)
    next_pos, row = torch.full((b,), -1), torch.full((b,), -1)
    next_pos, row = next_pos.int(), row.int()
    folded = torch.full((6,), -1, dtype=torch.int32)
    chain = torch.full((16, b), -1, dtype=torch.int32)
    record = torch.full((b, 16), -9, dtype=torch.int32)
    host = torch.full((4, b, 16), -9, dtype=torch.int32)
    slot = ints(5, 3, 2, 1, 0)
    kept = limit.clone()
    accept_kernel[(b,)](
        tokens, y, limit, torch.full((b,), 16, dtype=torch.int32), chance,
        seeds(*[(77, 0)] * b), slot, pos, next_pos, folded, row, chain,
        record, ints(6), host, 16, b * 16, 10**6, b, 16,
        M=m, MP=16, TURNS=4, SALT=ACCEPTANCE_CHOICE,
    )  # fmt: skip
    forced = None
    if synthetic is not None:
        forced = torch.tensor(
            [
                [synthetic_acceptance(77, 0, int(pos[x]) + 1 + j, synthetic) for j in range(m - 1)]
                for x in range(b)
            ]
        )
    want = accept(before[:, :m].long(), y.long(), kept.long(), forced)
    for lane in range(b):
        n = int(want[lane])
        committed = [*before[lane, 1 : 1 + n].tolist(), int(y[lane, n])]
        assert record[lane, :m].tolist() == committed + [-1] * (m - n - 1)
        assert int(record[lane, 15]) == n + 1
        assert torch.equal(host[2, lane], record[lane])  # turn 6 of 4
        assert int(tokens[lane, 0]) == committed[-1]
        assert int(next_pos[lane]) == int(pos[lane]) + n + 1
        assert int(folded[slot[lane]]) == int(pos[lane])
        assert int(row[lane]) == lane * m + n
        assert chain[:m, lane].tolist() == [int(pos[lane]) + n + j for j in range(m)]
        assert int(limit[lane]) == m - 1
    assert bool((host[[0, 1, 3]] == -9).all())


def test_embedding_and_mtp_input() -> None:
    from vkengine.ops.embed.triton import embed_kernel, mtp_input_kernel

    torch.manual_seed(2)
    v, hidden, m, b = 20, 12, 2, 2
    table = torch.randn(v, hidden)
    tokens = torch.zeros(b, 16, dtype=torch.int32)
    tokens[0, :2], tokens[1, :2] = ints(3, 19), ints(0, -1)
    h, hx = torch.full((4, hidden), float("nan")), torch.full((4, hidden), float("nan"))
    pos, next_pos = ints(-1, -1), ints(8, 9)
    gain, squares = torch.randn(hidden), torch.full((4, 3), float("nan"))
    turn = ints(7)
    embed_kernel[(4,)](
        tokens, table, gain, h, hx, squares, pos, next_pos, turn, 16, v,
        M=m, H=hidden, HP=16, GROUP=4,
    )  # fmt: skip
    assert int(turn) == 8
    assert torch.equal(h, table[[3, 19, 0, 0]])
    assert torch.equal(hx, h * (1 + gain))
    assert torch.allclose(squares, h.square().unflatten(1, (3, 4)).sum(-1))
    assert torch.equal(pos, next_pos)
    gains = [torch.randn(hidden) for _ in range(3)]
    x = torch.full((2, 2 * hidden), float("nan"))
    mtp_input_kernel[(2,)](
        tokens, table, h, ints(1, 2), *gains, x, 16, v, 1e-6, M=1, H=hidden, HP=16, HAS_ROW=True
    )

    def norm(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-6) * (1 + g)

    final, embedding, hidden_gain = gains
    want = torch.cat((norm(table[[3, 0]], embedding), norm(norm(h[[1, 2]], final), hidden_gain)), 1)
    assert torch.allclose(x, want, atol=1e-5)
