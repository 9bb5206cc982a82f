"""Framing: whatever way the bytes are cut, the same events come out."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finalbench.client.connection import Transfer
from finalbench.client.sse import Dechunker, EventParser, FramingError
from finalbench.client.stream import interpret

cuts = st.lists(st.integers(1, 40), min_size=1, max_size=200)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """`data` in pieces of the given sizes, repeated to the end."""
    pieces, at, turn = [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        pieces.append(data[at : at + size])
        at, turn = at + size, turn + 1
    return pieces


def events(pieces: list[bytes]) -> list[tuple[str | None, bytes]]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@given(
    st.lists(st.binary(max_size=300), max_size=12),
    st.booleans(),
    cuts,
)
def test_dechunking_does_not_depend_on_the_cut(
    chunks: list[bytes], trailer: bool, sizes: list[int]
) -> None:
    coded = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in chunks if c)
    coded += b"0\r\n" + (b"X-Sum: 1\r\n" if trailer else b"") + b"\r\n"
    dechunker = Dechunker()
    body = b"".join(dechunker.feed(piece) for piece in cut(coded, sizes))
    assert body == b"".join(chunks)
    assert dechunker.done


def test_dechunking_is_not_done_before_the_end() -> None:
    dechunker = Dechunker()
    assert dechunker.feed(b"5;name=value\r\nhello\r\n0\r\n") == b"hello"
    assert not dechunker.done
    dechunker.feed(b"\r\n")
    assert dechunker.done


@pytest.mark.parametrize(
    "bad",
    [
        b"zz\r\nhello\r\n",
        b"\r\n",
        b"-1\r\n",
        b"5\r\nhelloXX0\r\n\r\n",
        b"0\r\n\r\nmore",
        b"1_0\r\n",
    ],
)
def test_bad_chunking_is_an_error(bad: bytes) -> None:
    with pytest.raises(FramingError):
        Dechunker().feed(bad)


line = st.text(st.characters(blacklist_characters="\r\n\0\ufeff", codec="utf-8"), max_size=30)


@given(st.lists(line, min_size=1, max_size=8), st.sampled_from(["\n", "\r\n", "\r"]), cuts)
def test_events_do_not_depend_on_the_cut(texts: list[str], end: str, sizes: list[int]) -> None:
    """T19: characters of several bytes are cut anywhere."""
    body = "".join(f": note{end}{end}data: {text}{end}{end}" for text in texts).encode()
    # One leading blank belongs to the syntax, and the fast path must not take two.
    assert events(cut(body, sizes)) == [(None, text.encode()) for text in texts]
    assert events([body]) == events(cut(body, sizes))


def test_event_syntax() -> None:
    body = (
        b"\xef\xbb\xbfevent: error\ndata: a\ndata:b\nid: 7\n\n"
        b": comment only\n\n\n\nretry: 5\n\ndata\n\ndata: last"
    )
    parser = EventParser()
    assert parser.feed(body) == [("error", b"a\nb"), (None, b"")]
    assert parser.rest() == (None, b"last")


def stream_body(sizes: list[int], *, ids: bool, end: str) -> tuple[bytes, list[int], str]:
    """A stream whose chunk number i holds sizes[i] tokens; its ids and its text."""
    token, rows, text = 0, [], ""
    for index, size in enumerate(sizes):
        tokens = list(range(token, token + size))
        token += size
        piece = "".join("aé日🙂\n"[t % 5] for t in tokens)
        text += piece
        choice: dict[str, object] = {"index": 0, "text": piece, "finish_reason": None}
        if ids:
            choice["token_ids"] = tokens
        if index == len(sizes) - 1:
            choice["finish_reason"] = "length"
        rows.append(json.dumps({"choices": [choice]}, ensure_ascii=False))
    usage = {"prompt_tokens": 4, "completion_tokens": token, "total_tokens": token + 4}
    rows.append(json.dumps({"choices": [], "usage": usage}))
    rows.append("[DONE]")
    return "".join(f"data: {row}{end}{end}" for row in rows).encode(), list(range(token)), text


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=20),
    st.booleans(),
    st.sampled_from(["\n", "\r\n"]),
    cuts,
)
def test_any_cut_gives_the_same_counts(
    sizes: list[int], ids: bool, end: str, pieces: list[int]
) -> None:
    """T01, T19: counts, ids, text and order of times depend on the content alone."""
    body, tokens, text = stream_body(sizes, ids=ids, end=end)
    parts = cut(body, pieces)
    stamps = array("q", range(1000, 1000 + len(parts)))
    result = interpret(
        Transfer(http_status=200, stamps=stamps, pieces=parts, done_ns=1000 + len(parts))
    )
    assert result.status == "ok"
    assert result.token_count == sum(sizes)
    assert result.token_ids == (tuple(tokens) if ids else ())
    assert result.token_source == ("ids" if ids else "usage")
    assert result.text == text
    assert [n for _, n in result.chunks] == (sizes if ids else [0] * len(sizes))
    times = [at for at, _ in result.chunks]
    assert times == sorted(times)
    # Each event is stamped with the read that completed it; a CR ends a line by itself.
    mark = b"\n\n" if end == "\n" else b"\r\n\r"
    ends = [at for at in range(len(body)) if body[: at + 1].endswith(mark)]
    bounds = [sum(map(len, parts[: i + 1])) for i in range(len(parts))]
    expected = [
        next(1000 + i for i, bound in enumerate(bounds) if bound > at) for at in ends[: len(sizes)]
    ]
    assert times == expected
