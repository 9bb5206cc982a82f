"""Prompts: exact length, never a shared prefix by accident, the same for every arm."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from itertools import combinations

import httpx2
import pytest

from finalbench.client.http import StreamClient
from finalbench.client.scrape import cache_hit_share, fetch, flush_cache
from finalbench.client.stream import StreamResult, complete
from finalbench.client.workload import (
    MIN_NATURAL,
    Prompt,
    PromptSpec,
    ServerTokenizer,
    build_prompts,
    check_disjoint,
    digest_ids,
    request_body,
    reuse_factor,
    text_vocabulary,
)
from finalbench.errors import EnvironmentMissing, UsageError
from finalbench.prompts import DOMAINS, load_prompts
from finalbench.scenario import DraftSetting, Sampling
from finalbench.testing.launch import ToyThread
from finalbench.testing.toy_model import PIECES, decode, encode

GREEDY = Sampling(name="greedy")


class Merging:
    """The toy's tokenizer without a server."""

    def encode(self, text: str) -> list[int]:
        return encode(text)


@pytest.fixture(scope="module")
def toy() -> Iterator[ToyThread]:
    with ToyThread() as running:
        yield running


def send(url: str, prompts: list[Prompt], output_len: int = 1) -> list[StreamResult]:
    async def go() -> list[StreamResult]:
        async with StreamClient() as client:
            return [
                await complete(
                    client,
                    url,
                    request_body(
                        prompt,
                        model=None,
                        output_len=output_len,
                        sampling=GREEDY,
                        draft=None,
                        seed=1,
                    ),
                )
                for prompt in prompts
            ]

    return asyncio.run(go())


def shared_prefix(first: Prompt, second: Prompt) -> int:
    for at, (a, b) in enumerate(zip(first.token_ids, second.token_ids, strict=False)):
        if a != b:
            return at
    return min(len(first.token_ids), len(second.token_ids))


def test_prompts_are_many_and_our_own() -> None:
    texts = load_prompts()
    assert len(texts) >= 60
    assert len({prompt.id for prompt in texts}) == len(texts)
    assert len({prompt.text for prompt in texts}) == len(texts)
    for domain in DOMAINS:
        rows = load_prompts(domain)
        assert len(rows) >= 10
        assert all(row.domain == domain and row.id.startswith(domain) for row in rows)
    assert sum(len(row.text) for row in load_prompts("code")) >= 30_000
    assert sum(len(row.text) >= 300 for row in texts) >= 40
    # A placeholder or a copied licence line would not be a prompt of ours.
    assert not [row.id for row in texts if re.search(r"(?i)lorem|TODO|copyright", row.text)]


@pytest.mark.parametrize("text_class", ["natural", "random"])
@pytest.mark.parametrize("length", [16, 17, 128, 512, 2048])
def test_every_prompt_has_the_length_asked_for(
    toy: ToyThread, text_class: str, length: int
) -> None:
    """W01: random ids do not survive decode and encode, so ids are what is sent."""
    url = toy.use("ok,step_ms=0,prefill_ms=0")
    with httpx2.Client() as http:
        tokenizer = ServerTokenizer(http, url)
        spec = PromptSpec(length=length, count=3, group="g", text_class=text_class)  # type: ignore[arg-type]
        prompts = build_prompts(spec, tokenizer)
    for prompt, result in zip(prompts, send(url, prompts), strict=True):
        assert len(prompt.token_ids) == length
        assert result.usage is not None and result.usage.prompt == length
        assert result.prompt_token_ids == prompt.token_ids
    if text_class == "random" and length >= 128:
        again = [len(encode(decode(prompt.token_ids))) for prompt in prompts]
        assert any(count != length for count in again)


def test_a_servers_other_count_shows(toy: ToyThread) -> None:
    """W04: a mismatch that begins with the second prompt is in the second record."""
    url = toy.use("prompt_inflated,step_ms=0")
    prompts = build_prompts(PromptSpec(length=64, count=3, group="g"), Merging())
    counts = [result.usage.prompt for result in send(url, prompts) if result.usage]
    assert counts == [64, 67, 67]


@pytest.mark.parametrize(("length", "fine"), [(0, False), (1, True), (2, True)])
def test_smallest_lengths(length: int, fine: bool) -> None:
    """W03: checked before anything is sent."""
    spec = PromptSpec(length=length, count=2, group="g", text_class="random")
    if fine:
        prompts = build_prompts(spec, Merging())
        assert [len(prompt.token_ids) for prompt in prompts] == [length] * 2
    else:
        with pytest.raises(UsageError, match=r"seq_len: 0 is too short"):
            build_prompts(spec, Merging())
    with pytest.raises(UsageError, match=f"at least {MIN_NATURAL} tokens"):
        PromptSpec(length=length, count=2, group="g").check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"domains": ("cooking",)}, "cooking"),
        ({"domains": ()}, "domains"),
        ({"count": 0}, "requests"),
        ({"shared_share": 1.0}, "shared_share"),
    ],
)
def test_bad_specs_are_named(change: dict[str, object], message: str) -> None:
    spec = PromptSpec(**{"length": 64, "count": 1, "group": "g", **change})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        build_prompts(spec, Merging())


def test_same_spec_same_prompts_other_spec_no_common_prefix() -> None:
    """C01, C04: cells, purposes and seeds never meet in a prefix cache."""
    base = {"length": 96, "count": 4, "group": "a", "domains": ("code", "chat")}
    variants = [
        {},
        {"group": "b"},
        {"seed": 1},
        {"purpose": "warmup"},
        {"purpose": "probe"},
        {"text_class": "random"},
    ]
    groups = [build_prompts(PromptSpec(**{**base, **v}), Merging()) for v in variants]  # type: ignore[arg-type]
    again = build_prompts(PromptSpec(**base), Merging())  # type: ignore[arg-type]
    assert [p.digest for p in again] == [p.digest for p in groups[0]]
    check_disjoint(*groups)
    for first, second in combinations([prompt for group in groups for prompt in group], 2):
        # The fixed words of the salt line may agree, never a whole cache block of 16 ids.
        assert shared_prefix(first, second) < 16


def test_a_longer_prompt_does_not_begin_with_a_shorter_one() -> None:
    """C01: a sweep over lengths meets no warm prefix, since the group is another."""
    short = build_prompts(PromptSpec(length=128, count=2, group="128"), Merging())
    long = build_prompts(PromptSpec(length=512, count=2, group="512"), Merging())
    assert all(shared_prefix(a, b) < 16 for a in short for b in long)


def test_long_code_prompts_differ_and_do_not_repeat_themselves() -> None:
    prompts = build_prompts(PromptSpec(length=2048, count=4, group="g"), Merging())
    texts = [decode(prompt.token_ids) for prompt in prompts]
    for text in texts:
        lines = [line for line in text.splitlines() if len(line) > 40]
        assert len(lines) > 20
        assert len(set(lines)) > 0.9 * len(lines)
    for first, second in combinations(texts, 2):
        assert first[40:200] != second[40:200]


def test_disjointness_is_checked() -> None:
    """C04: a warm-up prompt that is also measured is refused."""
    prompts = build_prompts(PromptSpec(length=32, count=3, group="g"), Merging())
    with pytest.raises(UsageError, match="in two groups"):
        check_disjoint(prompts, prompts[:1])
    with pytest.raises(UsageError, match="twice in one group"):
        check_disjoint([prompts[0], prompts[0]])


def test_reuse_is_a_number() -> None:
    """W07: 49 prompts for 40,000 requests is a factor, not a footnote."""
    prompts = build_prompts(PromptSpec(length=32, count=4, group="g"), Merging())
    assert reuse_factor(prompts) == 1.0
    assert reuse_factor(prompts * 5) == 5.0


def test_random_prompts_draw_from_the_vocabulary_of_text() -> None:
    """W08: the class is part of the prompt; ids are none of the special ones."""
    vocabulary = text_vocabulary(Merging())
    assert 256 not in vocabulary
    prompt = build_prompts(
        PromptSpec(length=2000, count=1, group="g", text_class="random"), Merging()
    )[0]
    assert prompt.domain is None
    assert set(prompt.token_ids) <= set(vocabulary)
    assert len(set(prompt.token_ids)) > 0.9 * len(vocabulary)
    own = build_prompts(
        PromptSpec(length=50, count=1, group="g", text_class="random"), Merging(), [5, 6]
    )
    assert set(own[0].token_ids) == {5, 6}


def test_the_tokenizer_is_the_served_one(toy: ToyThread) -> None:
    """T17: two tokenizers give other ids for one text, and neither stands in for the other."""
    text = load_prompts("chat")[0].text
    with httpx2.Client() as http:
        merged = ServerTokenizer(http, toy.use("ok")).encode(text)
        plain = ServerTokenizer(http, toy.use("ok,tokenizer=bytes")).encode(text)
    assert b"".join(PIECES[i] for i in merged) == bytes(plain) == text.encode()
    assert len(plain) > 1.25 * len(merged)


def test_no_tokenizer_is_an_error_not_a_fallback(toy: ToyThread) -> None:
    """T18: nothing else is taken in its place."""
    with httpx2.Client() as http, pytest.raises(EnvironmentMissing, match="tokenize") as caught:
        ServerTokenizer(http, toy.use("ok") + "/elsewhere").encode("text")
    assert "tokenizer" in (caught.value.hint or "")


def test_every_sampler_field_is_sent() -> None:
    """W10: nothing is left to a server's defaults, and the body is valid JSON."""
    prompt = Prompt(0, "code", (1, 2), digest_ids((1, 2)))
    body = request_body(
        prompt,
        model="m",
        output_len=5,
        sampling=Sampling(name="warm", temperature=0.7, top_p=0.9),
        draft=DraftSetting(method="mtp", k=3, acceptance=0.8),
        seed=9,
    )
    for name in Sampling.model_fields.keys() - {"name"}:
        assert name in body
    assert body["draft"] == {
        "method": "mtp",
        "k": 3,
        "head_rows": None,
        "acceptance": {"synthetic": 0.8},
    }
    assert json.loads(json.dumps(body)) == body
    plain = request_body(prompt, model=None, output_len=5, sampling=GREEDY, draft=None, seed=9)
    assert "draft" not in plain and "model" not in plain


def test_other_defaults_do_not_reach_a_request(toy: ToyThread) -> None:
    """W10: two servers with different default top_k answer alike."""
    prompts = build_prompts(PromptSpec(length=32, count=2, group="g"), Merging())
    answers = [
        [result.token_ids for result in send(toy.use(knobs), prompts, output_len=6)]
        for knobs in ("ok,step_ms=0", "other_defaults,step_ms=0")
    ]
    assert answers[0] == answers[1]
    settings = httpx2.get(f"{toy.use('other_defaults')}/v1/settings").json()
    assert settings["sampler_defaults"]["top_k"] == 20


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_planned_prefix_share_is_the_measured_one(toy: ToyThread, seed: int, share: float) -> None:
    """W05, C12: after one priming request the hit share is the planned one."""
    url = toy.use("prefix_cache,step_ms=0,prefill_ms=0,prefill_us_per_token=0")
    spec = PromptSpec(length=640, count=9, group="g", seed=seed, shared_share=share)
    prompts = build_prompts(spec, Merging())
    assert {len(prompt.token_ids) for prompt in prompts} == {640}
    send(url, prompts[:1])
    with httpx2.Client() as http:
        before = fetch(http, url)
        send(url, prompts[1:])
        after = fetch(http, url)
    assert before is not None and after is not None
    assert cache_hit_share(before, after) == pytest.approx(share, abs=0.01)


def test_a_repeated_cell_is_seen_to_be_warm(toy: ToyThread) -> None:
    """C01: the same prompts again hit the cache, and the counters say so; a flush ends it."""
    url = toy.use("prefix_cache,step_ms=0,prefill_ms=0,prefill_us_per_token=0")
    prompts = build_prompts(PromptSpec(length=256, count=3, group="g"), Merging())
    shares = []
    with httpx2.Client() as http:
        for flush in (False, False, True):
            if flush:
                assert flush_cache(http, url)
            before = fetch(http, url)
            send(url, prompts)
            after = fetch(http, url)
            assert before is not None and after is not None
            shares.append(cache_hit_share(before, after))
    assert shares == [0.0, 1.0, 0.0]


def test_a_busy_flush_is_tried_again(toy: ToyThread) -> None:
    """C05: refused twice, then done; refused for ever is an error."""
    waits: list[float] = []
    with httpx2.Client() as http:
        url = toy.use("busy_flush")
        assert flush_cache(http, url, sleep=waits.append)
        assert len(waits) == 2
        with pytest.raises(EnvironmentMissing, match="busy"):
            flush_cache(http, toy.use("busy_flush,flush_busy=9999"), timeout_s=0.1, pause_s=0.01)
