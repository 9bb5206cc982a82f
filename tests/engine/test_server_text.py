"""Text from ids: split characters, stop strings, and any chunking giving the same (E57, E58)."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from serving import running
from tiny import write_tokenizer
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from vkengine.server.stops import StopStrings
from vkengine.tokenizer import Tokenizer

MIXED = "naïve 日本 😀🎉 café; end of the line"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


def _stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def test_split_characters_come_whole_e57(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀é")
    assert len(ids) > 2  # else nothing is split
    pieces = _stream(tokenizer, ids)
    assert "".join(pieces) == "😀é"
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 319), max_size=40))
def test_any_ids_decode_as_the_tokenizer_does_e57(ids: list[int]) -> None:
    tokenizer = _CACHED or _cache()
    assert "".join(_stream(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(_stream(tokenizer, ids, skip=False)) == tokenizer.decode(
        ids, skip_special_tokens=False
    )


_CACHED: Tokenizer | None = None


def _cache() -> Tokenizer:
    global _CACHED
    import tempfile

    folder = Path(tempfile.mkdtemp())
    write_tokenizer(folder)
    _CACHED = Tokenizer(folder)
    return _CACHED


def test_the_tail_is_flushed_e58(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀")
    assert "".join(_stream(tokenizer, ids[:1])) == "\ufffd"
    with running(FakeEngine(script=ids), tokenizer) as server:
        for count in (1, 3, len(ids)):
            body = {"prompt": [5], "max_tokens": count}
            whole = server.complete(**body).json["choices"][0]["text"]
            parts = [c["text"] for c in server.complete(**body, stream=True).chunks]
            assert whole == "".join(parts) == tokenizer.decode((ids * 3)[:count])
            assert whole


def test_other_decoders_use_a_window(tmp_path: Path) -> None:
    words = ["▁the", "▁cat", "s", "▁", "é", *[f"<0x{b:02X}>" for b in range(256)], "<unk>"]
    vocabulary = {word: i for i, word in enumerate(words)}
    fast = FastTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1),
        ]
    )
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    emoji = [vocabulary[f"<0x{b:02X}>"] for b in "😀".encode()]
    rng = random.Random(0)
    for _ in range(50):
        ids = []
        for _ in range(rng.randrange(1, 60)):
            ids += rng.choice([[0], [1], [2], [3], [4], emoji])
        pieces = _stream(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces)


def _cut(text: str, sizes: list[int]) -> list[str]:
    ends = list(itertools.accumulate(sizes))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def _through(stops: StopStrings, pieces: list[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        shown += stops.push(piece)
        if stops.matched is not None:
            return shown, stops.matched
    return shown + stops.flush(), None


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 4), max_size=12),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_pieces_e57(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    whole = _through(StopStrings(tuple(stops), include=include), list(text))
    pieces = _through(StopStrings(tuple(stops), include=include), _cut(text, sizes))
    assert pieces == whole
    shown, matched = whole
    if matched is None:
        assert shown == text
        assert not any(stop in text for stop in stops)
    else:
        body = shown.removesuffix(matched) if include else shown
        assert text.startswith(body + matched)
        assert not any(stop in (body + matched)[:-1] for stop in stops)


def test_text_is_held_only_while_it_may_become_a_stop() -> None:
    stops = StopStrings(("END",))
    assert [stops.push(p) for p in ("a", "E", "N", "x", "EN", "D")] == ["a", "", "", "ENx", "", ""]
    assert stops.matched == "END"


@pytest.mark.parametrize("per_step", [1, 2, 3, 4, 5, 6])
def test_chunking_changes_no_event_e57(tokenizer: Tokenizer, per_step: int) -> None:
    ids = tokenizer.encode(MIXED)
    stop = "é; e"
    cut = MIXED[: MIXED.index(stop)]
    needed = next(n for n in range(len(ids)) if stop in tokenizer.decode(ids[:n]))
    engine = FakeEngine(script=ids, per_step=per_step)
    with running(engine, tokenizer) as server:
        body = {"prompt": [5], "max_tokens": len(ids), "stop": ["zzz", stop]}
        body["return_token_ids"] = True
        stream = server.complete(**body, stream=True, stream_options={"include_usage": True})
        text = "".join(c["text"] for c in stream.chunks)
        streamed = [i for c in stream.chunks for i in c["token_ids"]]
        last = stream.chunks[-1]
        whole = server.complete(**body).json
        choice = whole["choices"][0]
        assert text == choice["text"] == cut
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        # What the engine made past the stop inside the round was never sent nor counted (E56).
        assert streamed == choice["token_ids"] == ids[:needed]
        assert stream.events[-1]["usage"]["completion_tokens"] == needed
        assert whole["usage"]["completion_tokens"] == needed
        assert server.engine.has_work() is False or server.engine.aborted


def test_stop_string_is_shown_on_request(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(script=tokenizer.encode(MIXED)), tokenizer) as server:
        body = {"prompt": [5], "max_tokens": 40, "stop": "日本"}
        assert server.complete(**body).json["choices"][0]["text"] == "naïve "
        shown = server.complete(**body, include_stop_str_in_output=True).json
        assert shown["choices"][0]["text"] == "naïve 日本"


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    letters = tokenizer.encode("aXaXaX")
    assert len(letters) == 6
    with running(FakeEngine(script=letters), tokenizer) as server:
        body = {"prompt": [5], "max_tokens": 6, "stop": "X"}
        assert server.complete(**body).json["choices"][0]["text"] == "a"
        assert server.complete(**body, min_tokens=3).json["choices"][0]["text"] == "aXa"
