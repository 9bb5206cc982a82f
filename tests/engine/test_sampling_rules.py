"""Noise, processors and their distributions, parameters."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from scipy import stats
from vkengine.ops.sample import process, row_key
from vkengine.ops.sample.noise import gumbel, philox4x32, word_bits
from vkengine.ops.sample.reference import keep_top_k, keep_top_p
from vkengine.sampler import Sampler, logprobs_of, make_processors, synthetic_acceptance
from vkengine.sampling import Draft, SamplingParams

V = 16
PROMPT, EMITTED = [1], [2, 9, 2]  # what penalties count


def test_philox_known_answers() -> None:
    """Random123's known-answer vectors of philox4x32-10."""
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    want = (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox4x32((ones,) * 4, (ones,) * 2) == want


def test_noise_vectors_never_change() -> None:
    """These numbers are what a seed means; other devices must give the same words."""
    key = row_key(1, 0, 5)
    ids = torch.arange(4, dtype=torch.int32)
    words = [w & 0xFFFFFFFF for w in word_bits(key, ids).tolist()]
    by_hand = []
    for i in range(4):
        x = i
        for k in key:
            x ^= k
            for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
                x ^= x >> shift
                x = x * multiplier & 0xFFFFFFFF
        by_hand.append(x)
    assert words == by_hand
    u = [((w >> 9) + 0.5) * 2.0**-23 for w in words]
    noise = gumbel(key, ids).tolist()
    assert noise == pytest.approx([-math.log(-math.log(x)) for x in u], rel=1e-5)
    assert key == (0x2907FE46, 0x4BAAF5D2)
    assert row_key(1, 0, 5) != row_key(1, 1, 5) != row_key(2, 1, 5) != row_key(2, 1, 6)
    assert row_key(1 << 40, 0, 5) != row_key(0, 0, 5)


def test_noise_is_gumbel_and_independent() -> None:
    ids = torch.arange(64, dtype=torch.int32)
    g = torch.stack([gumbel(row_key(9, 0, p), ids) for p in range(4000)])
    flat = g.flatten().double()
    assert flat.mean() == pytest.approx(0.5772, abs=0.01)
    assert flat.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert stats.kstest(flat[:50000].numpy(), "gumbel_r").pvalue > 1e-3
    corr = torch.corrcoef(g.T) - torch.eye(64)
    assert corr.abs().max() < 6 / math.sqrt(4000)
    neighbours = torch.corrcoef(torch.stack((g[:-1].flatten(), g[1:].flatten())))[0, 1]
    assert abs(neighbours) < 0.01
    assert torch.isfinite(g).all()


def expected(logits: list[float], params: SamplingParams) -> list[float]:
    """Probabilities in plain Python, independent of the engine's code."""
    x = list(logits)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in {*PROMPT, *EMITTED}:
        repetition = params.repetition_penalty
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(EMITTED):
        x[token] -= params.presence_penalty + params.frequency_penalty * EMITTED.count(token)
    x = [a / params.temperature for a in x]
    top = max(x)
    p = [math.exp(a - top) for a in x]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    keep = set(order[: params.top_k] if params.top_k else order)
    total = sum(p[i] for i in keep)
    reached, chosen = 0.0, set()
    for i in order:
        if i in keep and reached < params.top_p:
            chosen.add(i)
            reached += p[i] / total
    best = max(p[i] for i in chosen)
    chosen = {i for i in chosen if p[i] >= params.min_p * best}
    total = sum(p[i] for i in chosen)
    return [p[i] / total if i in chosen else 0.0 for i in range(len(x))]


SETS = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.5},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.15},
    "bias": {"temperature": 1.0, "logit_bias": {2: -100.0, 5: 2.0}},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.4},
    "presence": {"temperature": 1.0, "presence_penalty": 0.7},
    "frequency": {"temperature": 1.0, "frequency_penalty": 0.6},
    "all": {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "logit_bias": {1: 1.0}}
    | {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3},
}


@pytest.mark.parametrize("name", SETS)
def test_e32_e33_e34_distribution_of_200000_draws(name: str) -> None:
    """Chi-square of position-keyed draws against probabilities computed independently."""
    params = SamplingParams(**SETS[name], seed=1)
    logits = torch.randn(V, generator=torch.Generator().manual_seed(3)) * 1.5
    sampler = Sampler(params, make_processors(params, PROMPT, [], V), 77, V)
    sampler.commit(EMITTED, 0)
    scores = process(logits[None], sampler.processors, sampler.generated, [])[0]
    draws = 200_000
    noise = noise_of(77, draws, V)
    assert torch.allclose(noise[123], sampler.noise_at(123))
    tokens = (scores + noise).argmax(-1)
    # The sampler itself draws these very tokens, position by position.
    own = [sampler.choose(logits[None], at, [])[0] for at in range(300)]
    assert own == tokens[:300].tolist()
    counts = torch.bincount(tokens, minlength=V).tolist()
    want = expected(logits.tolist(), params)
    assert all(c == 0 for c, p in zip(counts, want, strict=True) if p == 0.0)
    seen = [(c, p * draws) for c, p in zip(counts, want, strict=True) if p * draws >= 5]
    scale = sum(c for c, _ in seen) / sum(e for _, e in seen)
    test = stats.chisquare([c for c, _ in seen], [e * scale for _, e in seen])
    assert test.pvalue > 1e-4, (counts, want)


@cache
def noise_of(seed: int, draws: int, vocab: int) -> torch.Tensor:
    """The keyed noise of many positions at once: the same words, keys as tensors."""
    keys = torch.tensor([row_key(seed, 0, p) for p in range(draws)], dtype=torch.int64)
    return _noise(keys, torch.arange(vocab, dtype=torch.int32))


def _noise(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    from vkengine.ops.sample.noise import mix

    both = torch.where(keys >= 1 << 31, keys - (1 << 32), keys).to(torch.int32)
    x = mix(ids[None] ^ both[:, :1])
    x = mix(x ^ both[:, 1:])
    u = (((x >> 9) & 0x7FFFFF).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))


def test_acceptance_under_coupling_is_that_of_shared_noise() -> None:
    """Drafter and target draw with one noise: agreement is far above independent draws, and the
    target's own distribution is untouched by what was drafted."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(V, generator=generator)
    drafter = target + 0.3 * torch.randn(V, generator=generator)
    noise = noise_of(5, 100_000, V)
    same = ((target + noise).argmax(-1) == (drafter + noise).argmax(-1)).double().mean()
    simulated = -torch.log(-torch.log(torch.rand(100_000, V, generator=generator)))
    agree = (target + simulated).argmax(-1) == (drafter + simulated).argmax(-1)
    assert float(same) == pytest.approx(float(agree.double().mean()), abs=0.01)
    p, q = torch.softmax(target, 0), torch.softmax(drafter, 0)
    assert same > float((p * q).sum()) + 0.2
    # A drafter that sees half of the ids still uses each id's own noise.
    half = ((target + noise).argmax(-1) == (drafter + noise)[:, : V // 2].argmax(-1)).double()
    half_sim = (target + simulated).argmax(-1) == (drafter + simulated)[:, : V // 2].argmax(-1)
    assert float(half.mean()) == pytest.approx(float(half_sim.double().mean()), abs=0.01)


def test_e36_temperature_zero_is_one_hot() -> None:
    params = SamplingParams(temperature=0, top_k=3, top_p=0.1, min_p=0.9)
    sampler = Sampler(params, make_processors(params, [1], [], V), 0, V)
    logits = torch.randn(5, V)
    assert sampler.plain
    assert sampler.choose(logits, 9, [1, 2, 3, 4]) == logits.argmax(-1).tolist()
    # With a bias the rows go the way of the sampled ones, and still no noise may be added.
    biased = SamplingParams(temperature=0, logit_bias={2: 0.5})
    sampler = Sampler(biased, make_processors(biased, [1], [], V), 0, V)
    assert not sampler.plain
    logits = torch.randn(60, V)
    want = (logits + 0.5 * (torch.arange(V) == 2)).argmax(-1).tolist()
    assert sampler.choose(logits, 9, [1] * 59) == want


@pytest.mark.parametrize(
    "row",
    [
        [0.0] * V,
        [-1e30] * (V - 1) + [5.0],
        [float("-inf")] * (V - 1) + [0.0],
        [float("nan")] * V,
        [float("-inf")] * V,
    ],
)
def test_e42_e44_odd_rows_give_valid_ids(row: list[float]) -> None:
    for more in SETS.values():
        params = SamplingParams(**more)
        sampler = Sampler(params, make_processors(params, [1], [], V), 3, V)
        (token,) = sampler.choose(torch.tensor([row]), 4, [])
        assert 0 <= token < V
        if max(row) == row[-1] > 0:
            assert token == V - 1


def test_e65_ties_go_to_the_lowest_id() -> None:
    params = SamplingParams(temperature=0)
    sampler = Sampler(params, make_processors(params, [1], [], V), 0, V)
    logits = torch.zeros(3, V)
    logits[0, [4, 9]] = 2.0
    logits[1, [15, 3]] = 7.0
    assert sampler.choose(logits, 0, [1, 2]) == [4, 3, 0]
    kept = process(torch.zeros(1, V), make_processors(SamplingParams(top_k=3), [1], [], V), 0, [])
    assert torch.isfinite(kept[0]).nonzero().flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_on_a_large_vocabulary_equals_a_full_sort(top_p: float) -> None:
    """Sharp rows, flat rows (whose nucleus is larger than what is ordered first), tied rows."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 2000, generator=generator) * torch.tensor([[9.0], [3], [0.1], [0], [1]])
    logits[4] = logits[4].round()
    got = keep_top_p(logits, top_p)
    for row, kept in zip(logits, got, strict=True):
        plain = row.tolist()
        order = [i for _, i in sorted((-x, i) for i, x in enumerate(plain))]
        probs = torch.softmax(row.double(), 0).tolist()
        reached, want = 0.0, set()
        for i in order:
            if reached >= top_p - 1e-7:
                break
            want.add(i)
            reached += probs[i]
        have = set(torch.isfinite(kept).nonzero().flatten().tolist())
        assert len(have ^ want) <= 1, (len(have), len(want))  # rounding at the very edge
        assert have == set(order[: len(have)])


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_a_tie() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)).mul(2).round()
    for k in (1, 5, 50, 299):
        got = torch.isfinite(keep_top_k(logits, k))
        assert got.sum(-1).tolist() == [k] * 4
        for row, kept in zip(logits.tolist(), got, strict=True):
            order = sorted(range(300), key=lambda i, r=row: (-r[i], i))
            assert sorted(order[:k]) == kept.nonzero().flatten().tolist()


def test_e48_each_row_counts_its_own_prefix() -> None:
    """Penalties of row j: prompt, emitted tokens, drafts before j; nothing else, nothing twice."""
    params = SamplingParams(
        temperature=0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25
    )
    sampler = Sampler(params, make_processors(params, [1, 2], [], V), 0, V)
    sampler.commit([3, 3], 4)
    logits = torch.linspace(-2, 2, V).repeat(3, 1)
    drafts = [3, 9]
    got = sampler.scores(logits, 4, drafts)
    for j in range(3):
        counts = [0.0] * V
        for token in [3, 3, *drafts[:j]]:
            counts[token] += 1
        for i in range(V):
            x = float(logits[j, i])
            if counts[i] or i in (1, 2):
                x = x / 2.0 if x > 0 else x * 2.0
            x -= 0.25 * counts[i] + (0.5 if counts[i] else 0.0)
            assert float(got[j, i]) == pytest.approx(x, abs=1e-6), (j, i)
    # The drafter's view of the same prefix, one row at a time.
    for j in range(3):
        alone = sampler.scores(logits[j : j + 1], 4 + j, drafts[:j], ahead=j)
        assert torch.equal(alone[0], got[j])
    assert torch.equal(sampler.processors.counts, torch.tensor([0.0] * 3 + [2.0] + [0.0] * 12))


def test_min_tokens_bans_stops_per_position() -> None:
    params = SamplingParams(temperature=0, min_tokens=3, max_tokens=9)
    sampler = Sampler(params, make_processors(params, [1], [0, 5], V), 0, V)
    logits = torch.zeros(4, V)
    logits[:, 0] = 9.0
    assert sampler.choose(logits, 1, [1, 1, 1]) == [1, 1, 1, 0]
    sampler.commit([1, 1], 3)
    assert sampler.choose(logits, 3, [1, 1, 1]) == [1, 0, 0, 0]


def test_logprobs_rank_and_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    (entry,) = logprobs_of(logits, [2], 3)
    total = math.log(sum(math.exp(x) for x in (1.0, 3.0, 3.0, 0.0)))
    assert entry.logprob == pytest.approx(3.0 - total, abs=1e-6)
    assert entry.rank == 2
    assert [i for i, _ in entry.top] == [1, 2, 0]
    assert entry.logprob + entry.logsumexp == pytest.approx(3.0, abs=1e-6)


def test_synthetic_acceptance_is_keyed_and_has_the_stated_chance() -> None:
    hits = [synthetic_acceptance(4, 0, p, 0.8) for p in range(20_000)]
    assert sum(hits) / 20_000 == pytest.approx(0.8, abs=0.01)
    assert hits == [synthetic_acceptance(4, 0, p, 0.8) for p in range(20_000)]
    assert all(synthetic_acceptance(1, 0, p, 1.0) for p in range(100))
    assert not any(synthetic_acceptance(1, 0, p, 0.0) for p in range(100))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", 99),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("logprobs", -1),
        ("prompt_logprobs", 101),
        ("seed", 1 << 64),
        ("logit_bias", {1: math.nan}),
    ],
)
def test_bad_parameters_name_their_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}:"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("method", "x"), ("k", 9), ("k", True), ("k", "some"), ("head_rows", 0), ("acceptance", 1.5)],
)
def test_bad_drafts_name_their_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^draft.{field}:"):
        Draft(**{"method": "mtp", "k": 1, field: value})
