"""Bit equality: drafts on or off, alone or among others, however the prompt is cut."""

from __future__ import annotations

import pytest
import torch
from qwen import VOCAB, engine, generate, prompt
from vkengine.draft.oracle import Oracle
from vkengine.sampling import Draft, SamplingParams

# Long enough to pass three of the blocks of eight in which state is folded, and the ring of 16.
TOKENS = 28
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
EVERYTHING = {
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {3: -100.0, 7: 1.5},
    "min_tokens": 12,
    "seed": 99,
}


def with_draft(params: SamplingParams, draft: Draft) -> SamplingParams:
    values = {name: getattr(params, name) for name in SamplingParams.__slots__}
    return SamplingParams(**{**values, "draft": draft})


def sampled(temperature: float, **more: object) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, max_tokens=TOKENS, ignore_eos=True, **{**EVERYTHING, **more}
    )


# The feed-forward part sees neither drafts nor rollback: a dense one needs no depth in between.
@pytest.mark.parametrize(
    ("moe", "k"), [*((True, k) for k in range(1, 9)), *((False, k) for k in (1, 2, 3, 8))]
)
def test_greedy_mtp_drafts_change_nothing(moe: bool, k: int) -> None:
    eng = engine(moe=moe)
    ids = prompt(21, seed=k)
    plain = generate(eng, ids, GREEDY)
    assert generate(eng, ids, with_draft(GREEDY, Draft("mtp", k))) == plain
    assert len(plain) == TOKENS


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_e13_short_prompts(length: int) -> None:
    eng = engine()
    ids = prompt(length)
    plain = generate(eng, ids, GREEDY)
    for draft in (Draft("mtp", 3), Draft("ngram", 3), Draft("mtp", "auto")):
        assert generate(eng, ids, with_draft(GREEDY, draft)) == plain, draft


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.5])
@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_sampled_with_every_processor(temperature: float, method: str) -> None:
    """E38, E45, E46, E48, E49: each position obeys every processor with its own prefix. E37: the
    same tokens are the same quality."""
    eng = engine()
    ids = prompt(18) + prompt(18)  # repeats, so that prompt lookup proposes
    params = sampled(temperature)
    plain = generate(eng, ids, params)
    for k in (1, 3, 8):
        assert generate(eng, ids, with_draft(params, Draft(method, k))) == plain, k
    assert 3 not in plain


@pytest.mark.parametrize("k", [1, 3, 5, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_oracle_with_every_accept_length(k: int, temperature: float) -> None:
    """E02: rollback after any number of accepted drafts; E04: acceptance is what it claims."""
    eng = engine()
    ids = prompt(30, seed=k)
    params = sampled(temperature)
    truth = generate(eng, ids, params)
    for shift in range(k + 1):
        eng.oracles["o"] = Oracle(truth, lambda r, s=shift: (k, (r + s) % (k + 1)), VOCAB)
        assert generate(eng, ids, with_draft(params, Draft("oracle", k)), "o") == truth, shift


def test_e01_drafts_only_now_and_then() -> None:
    eng = engine()
    ids = prompt(25)
    truth = generate(eng, ids, GREEDY)
    eng.oracles["o"] = Oracle(truth, lambda r: (4, 2) if r % 3 == 0 else (0, 0), VOCAB)
    assert generate(eng, ids, with_draft(GREEDY, Draft("oracle", 4)), "o") == truth


def test_e05_e100_first_position_does_not_depend_on_depth() -> None:
    """The first draft of a round is the same whatever k is."""
    eng = engine()
    ids = prompt(40)
    first = []
    for k in range(1, 9):
        eng.add("r", ids, with_draft(GREEDY, Draft("mtp", k)))
        eng.step()
        assert len(eng._running["r"].drafts) == k  # E100: no limit of the drafter's own
        first.append(eng._running["r"].drafts[0])
        eng.abort("r")
    assert len(set(first)) == 1


def test_long_context_across_attention_splits() -> None:
    """Rows on both sides of a 256-token split."""
    eng = engine(max_len=640)
    for length in (250, 253, 508):
        ids = prompt(length)
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        plain = generate(eng, ids, params)
        for k in (1, 3, 6, 8):
            assert generate(eng, ids, with_draft(params, Draft("mtp", k))) == plain, (length, k)
        eng.oracles["o"] = Oracle(plain, lambda r: (8, r % 9), VOCAB)
        assert generate(eng, ids, with_draft(params, Draft("oracle", 8)), "o") == plain


def test_e14_e70_alone_equals_among_others() -> None:
    """Joins and leaves at any step, mixed drafts, mixed sampling; each equals itself alone. E40:
    what belongs to a request (seed, position, slot) is looked up by its own rows."""
    eng = engine()
    kinds = [Draft(), Draft("mtp", 3), Draft("ngram", 4), Draft("mtp", 1), Draft("mtp", 8)]
    jobs = []
    for i in range(14):
        base = GREEDY if i % 3 else sampled(1.0, seed=i)
        jobs.append((prompt(3 + 11 * i % 90, seed=i), with_draft(base, kinds[i % 5])))
    alone = [generate(eng, ids, params) for ids, params in jobs]
    got: dict[str, list[int]] = {}
    waiting = list(range(14))
    step = 0
    while waiting or eng.has_work():
        if waiting and step % 2 == 0 and len(eng._running) < 7:
            i = waiting.pop(0)
            eng.add(str(i), *jobs[i])
            got[str(i)] = []
        if step == 20:
            eng.add("gone", prompt(17), GREEDY)
        if step == 26:
            eng.abort("gone")
        for output in eng.step():
            if output.request_id != "gone":
                got[output.request_id] += output.token_ids
        step += 1
    for i, want in enumerate(alone):
        assert got[str(i)] == want, i


def test_e70_a_neighbours_content_changes_no_bit() -> None:
    """Logits of one lane, bit for bit, with any neighbour and any number of rows (E64)."""
    from vkengine.step import run_round

    eng = engine()
    rows = []
    for others in ([], [prompt(9)], [prompt(50, 1), prompt(3, 2), prompt(33, 3)]):
        for ids in [prompt(40), *others]:
            eng.add(str(len(eng._running)), ids, GREEDY)
        while any(s.prefilling for s in eng._running.values()):
            eng.step()
        lanes = []
        from vkengine.step import Lane

        for s in eng._running.values():
            lanes.append(Lane(s.slot, s.position, s.output[-1], s.sampler, [5, 6, 7]))
        if len(eng._running["0"].output) == 1:
            with torch.inference_mode():
                rows.append(run_round(eng.model, lanes)[0].logits.clone())
        for name in list(eng._running):
            eng.abort(name)
    assert len(rows) == 3
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_e64_row_bits_for_every_round_size() -> None:
    """Row 0's logits are the same bits for M = 1..9; so are later rows'."""
    from vkengine.step import Lane, run_round

    eng = engine()
    for length in (6, 64, 251):
        eng.add("r", prompt(length), GREEDY)
        while eng._running["r"].prefilling:
            eng.step()
        s = eng._running["r"]
        drafts = prompt(8, seed=length)
        with torch.inference_mode():
            full = run_round(eng.model, [Lane(s.slot, s.position, 9, s.sampler, drafts)])[0]
            want = full.logits.clone()
            for m in range(8, 0, -1):
                lane = Lane(s.slot, s.position, 9, s.sampler, drafts[: m - 1])
                got = run_round(eng.model, [lane])[0].logits
                assert torch.equal(got, want[:m]), (length, m)
        eng.abort("r")


def test_chunked_prefill_equals_whole() -> None:
    """Any number of units per step, beside decoding neighbours or alone: same bits."""
    from vkengine import engine as module

    ids = prompt(333)
    results = []
    for units in (1, 2, 16):
        eng = engine(max_len=512)
        old = module.UNITS_ALONE
        module.UNITS_ALONE = units
        try:
            tokens = generate(eng, ids, GREEDY)
        finally:
            module.UNITS_ALONE = old
        results.append((tokens, eng.model.state.S[:, 0].clone()))
    eng = engine(max_len=512)
    eng.add("other", prompt(5), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    eng.step()
    eng.add("r", ids, GREEDY)
    slot = eng._running["r"].slot
    tokens = []
    while "r" in eng._running:
        for output in eng.step():
            tokens += output.token_ids if output.request_id == "r" else []
    results.append((tokens, eng.model.state.S[:, slot].clone()))
    for tokens, state in results[1:]:
        assert tokens == results[0][0]
        assert torch.equal(state, results[0][1])


def test_k_auto_gives_the_same_tokens() -> None:
    eng = engine()
    ids = prompt(15)
    for params in (GREEDY, sampled(0.8)):
        plain = generate(eng, ids, params)
        assert generate(eng, ids, with_draft(params, Draft("mtp", "auto"))) == plain


@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_e89_no_drafts_asked_for_is_no_drafting(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k = 0 runs what a request without drafts runs: one row a round, and the drafter rests."""
    eng = engine()
    ids = prompt(15) + prompt(15)
    plain = generate(eng, ids, GREEDY)
    monkeypatch.setattr(eng, "drafter", None)
    eng.add("r", ids, with_draft(GREEDY, Draft(method, 0)))
    steps, tokens = 0, []
    while eng.has_work():
        for output in eng.step():
            tokens += output.token_ids
            stats = output.stats
        steps += 1
        assert all(s.drafts == [] for s in eng._running.values())
    assert tokens == plain and steps == TOKENS
    assert stats.drafts == stats.draft_tokens == 0


def test_e08_poisoned_scratch_changes_nothing() -> None:
    eng = engine()
    ids = prompt(22)
    plain = generate(eng, ids, GREEDY)
    eng.add("r", ids, with_draft(GREEDY, Draft("mtp", 3)))
    tokens: list[int] = []
    while eng.has_work():
        with torch.inference_mode():
            eng.model.ws.poison()
        for output in eng.step():
            tokens += output.token_ids
    assert tokens == plain
