"""The Engine API: requests, stops, logprobs, counts, limits, synthetic acceptance."""

from __future__ import annotations

import pytest
import torch
from qwen import VOCAB, engine, generate, prompt, reference
from vkengine.draft.auto import AutoK
from vkengine.draft.ngram import NgramIndex
from vkengine.draft.oracle import Oracle
from vkengine.output import Output
from vkengine.sampling import Draft, SamplingParams


def greedy(**more: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **more})


def outputs(eng, ids: list[int], params: SamplingParams, name: str = "r") -> list[Output]:
    eng.add(name, ids, params)
    result = []
    while eng.has_work():
        result += eng.step()
    return result


def test_last_output_carries_reason_and_counts() -> None:
    got = outputs(engine(), prompt(10), greedy(draft=Draft("mtp", 3), seed=5))
    assert [o.finish_reason for o in got[:-1]] == [None] * (len(got) - 1)
    last = got[-1]
    assert last.finish_reason == "length"
    assert last.stats.prompt_tokens == 10
    assert last.stats.completion_tokens == 24 == sum(len(o.token_ids) for o in got)
    assert last.stats.seed == 5
    assert last.stats.drafts == len(got) - 1  # every step after prefill is one verify round
    assert last.stats.draft_tokens == 3 * last.stats.drafts
    assert sum(last.stats.accepted_per_pos) == last.stats.accepted_tokens
    assert last.stats.accepted_per_pos == sorted(last.stats.accepted_per_pos, reverse=True)


def test_counts_are_those_of_the_oracle() -> None:
    """Acceptance counters against known accept lengths (E96: what was asked for is what ran)."""
    eng = engine()
    truth = generate(eng, prompt(12), greedy())
    eng.oracles["o"] = Oracle(truth, lambda r: (4, r % 3), VOCAB)
    stats = outputs(eng, prompt(12), greedy(draft=Draft("oracle", 4)), "o")[-1].stats
    lengths = [r % 3 for r in range(stats.drafts)]
    assert stats.accepted_tokens == sum(lengths)
    assert stats.accepted_per_pos[:2] == [
        sum(x >= 1 for x in lengths),
        sum(x >= 2 for x in lengths),
    ]
    counters = eng.counters()
    assert counters["spec_decode_num_drafts"] == stats.drafts
    assert counters["spec_decode_num_accepted_tokens"] == stats.accepted_tokens
    assert counters["spec_decode_num_accepted_tokens_per_pos"] == stats.accepted_per_pos


@pytest.mark.parametrize("draft", [Draft(), Draft("mtp", 4), Draft("oracle", 8)])
def test_e54_e56_stop_inside_a_round_cuts_there(draft: Draft) -> None:
    eng = engine()
    truth = generate(eng, prompt(9), greedy())
    stop = truth[7]
    first = truth.index(stop)
    if draft.method == "oracle":
        eng.oracles["r"] = Oracle(truth, lambda r: (8, 8), VOCAB)
    got = outputs(eng, prompt(9), greedy(stop_token_ids=(stop,), draft=draft))
    tokens = [t for o in got for t in o.token_ids]
    assert tokens == truth[: first + 1]
    assert (got[-1].finish_reason, got[-1].stop_reason) == ("stop", stop)
    assert got[-1].stats.completion_tokens == first + 1
    # The next request in the same slot starts clean.
    assert generate(eng, prompt(9), greedy()) == truth


def test_eos_stops_unless_ignored_and_min_tokens_delays_it() -> None:
    eng = engine()
    bias = {0: 1000.0}  # id 0 is the end token
    got = outputs(eng, prompt(6), greedy(ignore_eos=False, logit_bias=bias))
    assert [t for o in got for t in o.token_ids] == [0]
    assert (got[-1].finish_reason, got[-1].stop_reason) == ("stop", None)
    for draft in (Draft(), Draft("mtp", 5)):
        params = greedy(ignore_eos=False, logit_bias=bias, min_tokens=7, draft=draft)
        tokens = [t for o in outputs(eng, prompt(6), params) for t in o.token_ids]
        assert len(tokens) == 8
        assert 0 not in tokens[:7] and tokens[7] == 0
    assert generate(eng, prompt(6), greedy(logit_bias=bias)) == [0] * 24


def test_length_is_bounded_by_the_context() -> None:
    eng = engine(max_len=64)
    for draft in (Draft(), Draft("mtp", 8), Draft("ngram", 8)):
        got = outputs(eng, prompt(50), greedy(max_tokens=1000, draft=draft))
        assert sum(len(o.token_ids) for o in got) == 14
        assert got[-1].finish_reason == "length"
    with pytest.raises(ValueError, match=r"^prompt_token_ids:"):
        eng.add("r", prompt(64), greedy())


@pytest.mark.parametrize("method", ["none", "mtp", "ngram", "oracle"])
def test_e60_one_logprob_entry_per_token(method: str) -> None:
    eng = engine()
    ids = prompt(14) + prompt(14)
    draft = Draft(method, 3) if method != "none" else Draft()
    if method == "oracle":  # rounds of one to four tokens
        eng.oracles["r"] = Oracle(generate(eng, ids, greedy()), lambda r: (3, r % 4), VOCAB)
    got = outputs(eng, ids, greedy(logprobs=2, draft=draft))
    tokens = [t for o in got for t in o.token_ids]
    assert method != "oracle" or max(len(o.token_ids) for o in got) == 4
    entries = [e for o in got for e in o.logprobs]
    assert [e.token_id for e in entries] == tokens
    with torch.no_grad():
        logits = reference()(torch.tensor([ids + tokens])).logits[0]
    want = torch.log_softmax(logits, -1)
    for i, entry in enumerate(entries):
        row = want[len(ids) - 1 + i]
        assert entry.logprob == pytest.approx(float(row[tokens[i]]), abs=1e-4)
        assert entry.rank == 1 and len(entry.top) == 2
        assert entry.top[0] == (tokens[i], entry.logprob)


@pytest.mark.parametrize("length", [1, 2, 64, 65, 150])
def test_prompt_logprobs(length: int) -> None:
    eng = engine()
    ids = prompt(length)
    got = outputs(eng, ids, greedy(max_tokens=1, prompt_logprobs=2))
    entries = got[0].prompt_logprobs
    assert len(entries) == length and entries[0] is None
    with torch.no_grad():
        want = torch.log_softmax(reference()(torch.tensor([ids])).logits[0], -1)
    for i in range(1, length):
        entry = entries[i]
        row = want[i - 1]
        assert entry.token_id == ids[i]
        assert entry.logprob == pytest.approx(float(row[ids[i]]), abs=1e-4)
        assert entry.rank == int((row > row[ids[i]]).sum()) + 1
        assert entry.top[0][0] == int(row.argmax())
    plain = generate(eng, ids, greedy(max_tokens=1))
    assert got[0].token_ids == plain


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_synthetic_acceptance_runs_every_pass(acceptance: float) -> None:
    eng = engine()
    draft = Draft("mtp", 3, acceptance=acceptance)
    params = greedy(max_tokens=120, seed=8, draft=draft)
    stats = outputs(eng, prompt(20), params)[-1].stats
    assert stats.draft_tokens == 3 * stats.drafts  # every draft pass ran
    rate = stats.accepted_tokens / stats.drafts
    want = acceptance + acceptance**2 + acceptance**3
    assert rate == pytest.approx(want, abs=0.0 if acceptance in (0.0, 1.0) else 0.3)
    again = outputs(eng, prompt(20), params)[-1].stats
    assert again.accepted_per_pos == stats.accepted_per_pos
    if acceptance == 0.0:  # nothing accepted: each round emits the target's own next token
        assert generate(eng, prompt(20), params) == generate(
            eng, prompt(20), greedy(max_tokens=120)
        )


def test_seeds_choices_and_their_defaults() -> None:
    eng = engine()
    ids = prompt(10)

    def run(**more: object) -> list[int]:
        return generate(eng, ids, SamplingParams(max_tokens=16, ignore_eos=True, **more))

    assert run(seed=1) == run(seed=1) != run(seed=2)
    assert run(seed=1, choice=1) != run(seed=1)
    assert run(seed=-3) == run(seed=-3)
    drawn = outputs(eng, ids, SamplingParams(max_tokens=16, ignore_eos=True))
    seed = drawn[-1].stats.seed
    assert [t for o in drawn for t in o.token_ids] == run(seed=seed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_e45_a_bias_reaches_every_row_of_a_round(temperature: float) -> None:
    """Banned ids never appear, and one raised above all others always does, k = 1..5."""
    eng = engine()
    ids = prompt(8)
    base = {"temperature": temperature, "max_tokens": 16, "ignore_eos": True, "seed": 4}
    # Ban what each position would like best, so that every row needs its ban.
    banned: set[int] = set()
    while len(banned) < 8:
        bias = dict.fromkeys(banned, -100.0)
        params = SamplingParams(**base, logit_bias=bias, logprobs=1)
        run = outputs(eng, ids, params)
        banned |= {o.logprobs[0].top[0][0] for o in run}
    bias = dict.fromkeys(banned, -100.0)
    wanted = [i for o in run for i in (o.logprobs[0].top[0][0],)]
    truth = generate(eng, ids, SamplingParams(**base, logit_bias=bias))
    assert len(set(wanted)) > 3 and not banned & set(truth)
    always = SamplingParams(**base, logit_bias={7: 1000.0})
    for k in range(1, 6):
        for bias_of, want in ((bias, truth), (always.logit_bias, [7] * 16)):
            eng.oracles["r"] = Oracle(want, lambda r, k=k: (k, k), VOCAB)
            params = SamplingParams(**base, logit_bias=bias_of, draft=Draft("oracle", k))
            got = outputs(eng, ids, params)
            assert [t for o in got for t in o.token_ids] == want, k
            assert len(got) == 1 + -(-15 // (k + 1))  # all accepted: every row counted


def test_e46_e49_e98_penalties_count_each_token_once() -> None:
    """Against counts kept in plain Python and logits of transformers, in rounds of many tokens."""
    eng = engine()
    ids = prompt(10)
    liked = dict.fromkeys(range(20, 26), 6.0)  # these come again and again
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.9}
    penalties["logit_bias"] = liked
    want: list[int] = []
    while len(want) < 20:
        with torch.no_grad():
            row = reference()(torch.tensor([ids + want])).logits[0, -1].tolist()
        for token, bias in liked.items():
            row[token] += bias
        for token in {*ids, *want}:
            row[token] = row[token] / 1.3 if row[token] > 0 else row[token] * 1.3
        for token in set(want):
            row[token] -= 0.4 + 0.9 * want.count(token)
        want.append(max(range(VOCAB), key=lambda i: row[i]))
    assert len(set(want)) < 15  # many come twice or more, or counts would not matter
    params = greedy(max_tokens=20, **penalties)
    assert generate(eng, ids, params) == want
    for k in (1, 4):
        eng.oracles["r"] = Oracle(want, lambda r, k=k: (k, r % (k + 1)), VOCAB)
        drafted = greedy(max_tokens=20, **penalties, draft=Draft("oracle", k))
        assert generate(eng, ids, drafted) == want


@pytest.mark.parametrize(
    ("ids", "params", "field"),
    [
        ([], greedy(), "prompt_token_ids"),
        ([VOCAB], greedy(), "prompt_token_ids"),
        ([-1], greedy(), "prompt_token_ids"),
        ([1], greedy(stop_token_ids=(VOCAB,)), "stop_token_ids"),
        ([1], greedy(logit_bias={VOCAB: 1.0}), "logit_bias"),
        ([1], greedy(draft=Draft("oracle", 1)), "draft.method"),
    ],
)
def test_e97_bad_requests_are_refused_before_they_run(ids, params, field: str) -> None:
    eng = engine()
    with pytest.raises(ValueError, match=f"^{field}:"):
        eng.add("r", ids, params)
    assert not eng.has_work() and len(eng._free) == 8


def test_settings_say_what_runs() -> None:
    settings = engine().settings()
    assert settings["profile"] == "vkae" and settings["weights"] == "real"
    assert settings["dtype"] == "float32" and settings["device"] == "cpu"
    assert settings["draft_methods"] == ["none", "ngram", "mtp"]
    assert settings["kernel_fallbacks"] == []
    assert settings["threads"] == 1


def test_ngram_proposes_what_followed() -> None:
    index = NgramIndex()
    index.extend([1, 2, 3, 4, 5, 1, 2, 3])
    assert index.propose(3) == [4, 5, 1]
    index.extend([4])
    assert index.propose(2) == [5, 1]
    index.extend([9])
    assert index.propose(4) == []
    loop = NgramIndex()
    loop.extend([7, 8, 7, 8, 7, 8])
    assert loop.propose(8) == [7, 8, 7, 8, 7, 8, 7, 8]


def test_auto_k_follows_acceptance() -> None:
    """E86: drafts that cannot pay are switched off, but for a probe now and then."""
    good, bad = AutoK(0.15), AutoK(0.15)
    for _ in range(60):
        k = good.choose()
        good.observe(k, k)
        k = bad.choose()
        bad.observe(k, 0)
    assert good.choose() >= 4
    ks = [bad.choose() for _ in range(64)]
    assert set(ks) == {0, 1}
    assert ks.count(1) == 4  # probes now and then


def test_e06_zero_acceptance_ends_in_plain_decoding() -> None:
    """Under k auto a drafter that is always wrong is switched off; the text is the same."""
    eng = engine()
    ids = prompt(11)
    truth = generate(eng, ids, greedy(max_tokens=90))
    eng.oracles["o"] = Oracle(truth, lambda r: (8, 0), VOCAB)
    got = outputs(eng, ids, greedy(max_tokens=90, draft=Draft("oracle", "auto")), "o")
    assert [t for o in got for t in o.token_ids] == truth
    stats = got[-1].stats
    assert stats.accepted_tokens == 0
    assert stats.draft_tokens < stats.drafts


def test_abort_frees_the_slot_at_once() -> None:
    eng = engine(max_sequences=1)
    eng.add("a", prompt(100), greedy())
    eng.step()
    eng.abort("a")
    assert not eng.has_work()
    assert generate(eng, prompt(5), greedy()) == generate(engine(), prompt(5), greedy())
