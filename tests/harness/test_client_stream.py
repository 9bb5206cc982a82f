"""One request against a server that misbehaves in one way at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx2
import pytest

from finalbench.client.http import StreamClient
from finalbench.client.scrape import delta, draft_counters, fetch
from finalbench.client.stream import StreamResult, complete
from finalbench.testing.launch import ToyThread

BODY = {"prompt": [1, 2, 3, 4], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
FAST = "step_ms=0,prefill_ms=0"


@pytest.fixture(scope="module")
def toy() -> Iterator[ToyThread]:
    with ToyThread() as running:
        yield running


def ask(
    base_url: str, *, chat: bool = False, timeout_s: float | None = 20.0, **fields: object
) -> StreamResult:
    body = {**BODY, **fields}
    if chat:
        body["messages"] = [{"role": "user", "content": "hello"}]
        del body["prompt"]

    async def go() -> StreamResult:
        async with StreamClient() as client:
            path = "/v1/chat/completions" if chat else "/v1/completions"
            return await complete(client, base_url, body, path=path, timeout_s=timeout_s)

    return asyncio.run(go())


def test_a_good_stream(toy: ToyThread) -> None:
    before = time.monotonic_ns()
    got = ask(toy.use(f"ok,{FAST}"))
    assert (got.status, got.error, got.http_status, got.done_seen) == ("ok", None, 200, True)
    assert got.token_source == "ids"
    assert len(got.token_ids) == 12
    assert [n for _, n in got.chunks] == [1] * 12
    assert got.usage is not None
    assert (got.usage.prompt, got.usage.completion) == (4, 12)
    assert got.prompt_token_ids == (1, 2, 3, 4)
    assert got.finish_reason == "length"
    assert got.done_ns is not None
    assert before < got.sent_ns < got.chunks[0][0] <= got.chunks[-1][0] <= got.done_ns
    assert got.connect_ns is not None and 0 < got.connect_ns < 10**9


@pytest.mark.parametrize("pattern", ["4", "1:4:2", "12", "5"])
def test_tokens_of_chunks_add_up_to_usage(toy: ToyThread, pattern: str) -> None:
    """T01, T16: chunks weigh by their tokens, the first one's tokens are known apart."""
    got = ask(toy.use(f"ok,pattern={pattern},{FAST}"))
    assert sum(n for _, n in got.chunks) == 12 == got.token_count
    assert got.first_chunk_tokens == int(pattern.split(":")[0])
    assert len(got.chunks) < 12


def test_the_same_metric_through_both_transports(toy: ToyThread) -> None:
    """T02: completions and chat count alike, with and without ids."""
    for knobs in ("ok", "usage_cumulative"):
        url = toy.use(f"{knobs},tokens_per_chunk=4,{FAST}")
        plain, chat = ask(url), ask(url, chat=True)
        assert [n for _, n in plain.chunks] == [n for _, n in chat.chunks] == [4, 4, 4]
        assert plain.token_count == chat.token_count == 12


def test_early_end_counts_what_came(toy: ToyThread) -> None:
    """T04, T23: the requested length plays no part."""
    got = ask(toy.use(f"early_eos,{FAST}"))
    assert (got.status, got.finish_reason, got.token_count) == ("ok", "stop", 5)


def test_both_counts_are_kept_when_they_disagree(toy: ToyThread) -> None:
    """T05, T06: ids and usage are stored side by side, neither is corrected by the other."""
    got = ask(toy.use(f"usage_wrong,{FAST}"))
    assert got.usage is not None
    assert (len(got.token_ids), got.usage.completion) == (12, 1)
    got = ask(toy.use(f"ok,usage_wrong_share=1,{FAST}"))
    assert got.usage is not None
    assert (len(got.token_ids), got.usage.completion) == (12, 11)


def test_usage_is_asked_for_and_missing_usage_is_not_zero(toy: ToyThread) -> None:
    """T08, T09: asked for; when the server ignores that, there is no count instead of 0."""
    assert ask(toy.use(f"no_ids,{FAST}")).token_source == "usage"
    got = ask(toy.use(f"usage_absent,{FAST}"))
    assert got.usage is None
    assert got.token_source is None
    assert got.token_count is None
    assert len(got.chunks) == 12  # enough is kept to recount later
    assert got.text


@pytest.mark.parametrize("chunking", ["tokens_per_chunk=1", "tokens_per_chunk=4", "pattern=1:4:2"])
@pytest.mark.parametrize("kind", ["cumulative", "incremental"])
def test_running_usage(toy: ToyThread, kind: str, chunking: str) -> None:
    """T01: usage in every chunk gives tokens per chunk, whether it adds up or not."""
    sizes = {"tokens_per_chunk=1": [1] * 12, "tokens_per_chunk=4": [4] * 3}
    got = ask(toy.use(f"usage_{kind},{chunking},{FAST}"))
    assert [n for _, n in got.chunks] == sizes.get(chunking, [1, 4, 2, 1, 4])
    assert got.token_count == 12
    assert got.usage_kind == kind


@pytest.mark.parametrize(
    ("behaviour", "tokens", "finish"),
    [("empty_body", 0, None), ("cut_stream", 5, None), ("context_limit", 3, "length")],
)
def test_nobody_is_credited_with_the_limit(
    toy: ToyThread, behaviour: str, tokens: int, finish: str | None
) -> None:
    """T10: empty body, cut before [DONE], context-limited output of 3."""
    got = ask(toy.use(f"{behaviour},{FAST}"))
    assert (got.token_count or 0) == tokens
    assert got.finish_reason == finish
    assert got.status == ("ok" if finish else "failed")


@pytest.mark.parametrize("behaviour", ["reasoning", "reasoning_alt", "reasoning_then_content"])
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("ids", ["true", "false"])
def test_every_channel_counts(toy: ToyThread, behaviour: str, chat: bool, ids: str) -> None:
    """T12, T14: the first token of any channel is the first token; both spellings are read."""
    got = ask(toy.use(f"{behaviour},ids={ids},reasoning_usage=true,{FAST}"), chat=chat)
    assert got.status == "ok"
    assert len(got.chunks) == 12
    assert got.token_count == 12  # T13: completion contains the reasoning tokens
    assert got.reasoning_text
    if behaviour == "reasoning_then_content":
        assert got.text.startswith(got.reasoning_text)
        assert len(got.text) > len(got.reasoning_text)
    else:
        assert got.text == got.reasoning_text


@pytest.mark.parametrize("behaviour", ["role_only", "empty_chunks"])
@pytest.mark.parametrize("chat", [True, False])
def test_chunks_without_tokens_never_count(toy: ToyThread, behaviour: str, chat: bool) -> None:
    """T12: role, empty and keep-alive chunks come at once, the first token 60 ms later."""
    got = ask(toy.use(f"{behaviour},step_ms=0,prefill_ms=60"), chat=chat)
    assert len(got.chunks) == 12
    assert got.chunks[0][0] - got.sent_ns >= 55e6


def test_the_end_is_the_last_content_event(toy: ToyThread) -> None:
    """T13: a delayed usage event and [DONE] move the end of the stream, not the last token."""
    got = ask(toy.use(f"late_done,{FAST}"))
    assert got.done_ns is not None
    assert got.done_ns - got.chunks[-1][0] >= 190e6
    assert got.chunks[-1][0] - got.sent_ns < 150e6


def test_time_stamps_are_taken_at_the_socket_read(toy: ToyThread) -> None:
    """T13: the stamp is the clock's value when bytes arrive, before anything is parsed."""
    ticks = iter(range(1, 10**6))

    async def go() -> StreamResult:
        clock = lambda: next(ticks)  # noqa: E731
        async with StreamClient(clock) as client:
            return await complete(client, toy.use("ok,step_ms=5"), BODY, clock)

    got = asyncio.run(go())
    stamps = [at for at, _ in got.chunks]
    # One reading of the clock for each read from the socket, and none in between; chunks that
    # arrive in one read share it.
    assert sorted(set(stamps)) == list(range(stamps[0], stamps[-1] + 1))
    assert len(set(stamps)) > 1


@pytest.mark.parametrize("split", [1, 2, 3, 7])
def test_characters_cut_anywhere(toy: ToyThread, split: int) -> None:
    """T19: ids count, the text is whole, no character is lost or doubled."""
    whole = ask(toy.use(f"split_utf8,split_bytes=0,{FAST}"))
    got = ask(toy.use(f"split_utf8,split_bytes={split},crlf=true,{FAST}"))
    assert got.token_ids == whole.token_ids
    assert got.text == whole.text
    assert any(char in got.text for char in "é日ж🙂")
    assert got.token_count == 12


def test_whitespace_counts_by_ids(toy: ToyThread) -> None:
    """T20: a run of newlines is as many tokens as ids, whatever its text would re-encode to."""
    got = ask(toy.use(f"newlines,{FAST}"), max_tokens=100)
    assert got.text == "\n" * 100
    assert got.token_count == 100
    assert got.token_source == "ids"


def test_padding_after_the_end_is_seen(toy: ToyThread) -> None:
    """T22: end tokens repeated to the limit arrive as ids, so a reader can cut them off."""
    got = ask(toy.use(f"padded,{FAST}"))
    assert got.token_ids[4:] == (256,) * 8


def test_totals_against_the_servers_counter(toy: ToyThread) -> None:
    """T24: the growth of the counter between two scrapes equals the ids, or shows the lie."""
    for knobs, factor in (("ok", 1.0), ("counter_mismatch", 1.75)):
        url = toy.use(f"{knobs},{FAST}")
        with httpx2.Client() as http:
            before = fetch(http, url)
            count = len(ask(url).token_ids)
            after = fetch(http, url)
        assert before is not None and after is not None
        assert delta(before, after, "generation_tokens") == count * factor


@pytest.mark.parametrize("behaviour", ["error_event", "error_named_event"])
@pytest.mark.parametrize("no_done", ["true", "false"])
def test_an_error_event_fails_the_request(toy: ToyThread, behaviour: str, no_done: str) -> None:
    """F01: a short stream that ends in an error is no fast success."""
    got = ask(toy.use(f"{behaviour},no_done={no_done},{FAST}"))
    assert got.status == "failed"
    assert got.error == "error event: the engine failed in mid-stream"
    assert len(got.token_ids) == 5


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("cut_stream", "closed in the middle"),
        ("no_done", "without [DONE]"),
        ("ok,no_finish=true", "without a finish reason"),
        ("abort", "finish_reason is 'abort'"),
        ("empty_body", "no event"),
        ("ok,fail_share=1", "HTTP 500: planned failure"),
        ("ok,fail_share=1,fail_status=429", "HTTP 429: planned failure"),
    ],
)
def test_only_a_proper_end_is_success(toy: ToyThread, behaviour: str, message: str) -> None:
    """F01, F02, T10: each failure says which it is."""
    got = ask(toy.use(f"{behaviour},{FAST}"))
    assert got.status == "failed"
    assert got.error is not None and message in got.error


def test_a_refused_field_is_named(toy: ToyThread) -> None:
    got = ask(toy.use("ok"), temperatur=0.5)
    assert (got.status, got.http_status) == ("failed", 400)
    assert "temperatur" in (got.error or "")


def test_a_silent_stream_times_out(toy: ToyThread) -> None:
    got = ask(toy.use(f"stall,{FAST}"), timeout_s=0.3)
    assert (got.status, got.error) == ("failed", "timed out after 0.3 s")
    assert len(got.token_ids) == 5


def test_nobody_listens() -> None:
    got = ask("http://127.0.0.1:9")
    assert got.status == "failed"
    assert (got.error or "").startswith("cannot connect")
    assert got.chunks == ()


def test_connections_are_reused_and_timed_apart(toy: ToyThread) -> None:
    """L06: the second request opens no connection; connecting is never inside sent to first."""
    url = toy.use(f"ok,{FAST}")

    async def go() -> list[StreamResult]:
        async with StreamClient() as client:
            return [await complete(client, url, BODY) for _ in range(5)]

    results = asyncio.run(go())
    assert [result.connect_ns is None for result in results] == [False, True, True, True, True]
    assert httpx2.get(f"{url}/toy/stats").json()["connections"] == 1


def test_a_connection_closed_while_idle_is_replaced(toy: ToyThread) -> None:
    url = toy.use(f"cut_stream,{FAST}")

    async def go() -> list[StreamResult]:
        async with StreamClient() as client:
            first = await complete(client, url, BODY)
            toy.use(f"ok,{FAST}")
            return [first, await complete(client, url, BODY)]

    first, second = asyncio.run(go())
    assert (first.status, second.status) == ("failed", "ok")
    assert second.connect_ns is not None


def test_drafts_change_chunks_but_no_token(toy: ToyThread) -> None:
    """S01, S04: same ids with drafts on; per-request counters agree with the totals' growth."""
    url = toy.use(f"ok,{FAST},draft_ms=0")
    plain = ask(url, max_tokens=60)
    draft = {"method": "mtp", "k": 3}
    for _ in range(2):
        with httpx2.Client() as http:
            before = fetch(http, url)
            drafted = ask(url, max_tokens=60, draft=draft)
            after = fetch(http, url)
        assert before is not None and after is not None
        assert drafted.token_ids == plain.token_ids
        assert len(drafted.chunks) < len(plain.chunks)
        spec, grown = drafted.spec, draft_counters(before, after)
        assert spec is not None and grown is not None
        assert (grown.drafts, grown.accepted) == (spec.drafts, spec.accepted_tokens)
        assert spec.draft_tokens == 3 * spec.drafts
        assert sum(spec.accepted_per_pos) == spec.accepted_tokens
        assert grown.acceptance_length == 1 + spec.accepted_tokens / spec.drafts


def test_draft_faults_show(toy: ToyThread) -> None:
    """S01, S05: a wrong accept rule changes ids, a drafter that is never right changes none."""
    draft = {"method": "mtp", "k": 3}
    plain = ask(toy.use(f"ok,{FAST}"))
    wrong = ask(toy.use(f"draft_diverges,{FAST}"), draft=draft)
    assert wrong.token_ids[:7] == plain.token_ids[:7]
    assert wrong.token_ids[7] != plain.token_ids[7]
    rejected = ask(toy.use(f"rejects_all,{FAST}"), draft=draft)
    assert rejected.spec is not None
    assert rejected.spec.accepted_tokens == 0
    assert rejected.token_ids == plain.token_ids
    fake = ask(toy.use(f"fake_counters,{FAST}"), draft=draft)
    assert fake.spec is not None
    assert fake.spec.accepted_tokens > fake.spec.draft_tokens
    assert ask(toy.use(f"no_counters,{FAST}"), draft=draft).spec is None


def test_the_wall_clock_plays_no_part(toy: ToyThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """L17: wall time that jumps back 5 s changes nothing."""
    offsets = iter([0.0] + [-5.0] * 100_000)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(offsets))
    got = ask(toy.use("ok,step_ms=2"))
    stamps = [got.sent_ns, *(at for at, _ in got.chunks)]
    assert stamps == sorted(stamps)
    assert stamps[-1] - stamps[0] < 3e9
