"""Whatever is posted, the answer is 2xx, 4xx or a deliberate 503, and the server stays up."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Running, running
from tiny import write_tokenizer
from vkengine.server.protocol import ChatBody, CompletionBody
from vkengine.tokenizer import Tokenizer

FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, "bogus", "\u0000", "a.b"})
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(0, 8)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "k", "method", "synthetic", "7", "type"]), inner
        )
    ),
    max_leaves=6,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=5)
PROMPTS: dict[str, Any] = {
    "/v1/completions": {"prompt": [5]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
fuzz = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    with running(FakeEngine(per_step=3), Tokenizer(folder)) as server:
        yield server
        assert server.idle()
        assert server.complete(prompt=[5]).status == 200


def _check(server: Running, path: str, raw: bytes) -> None:
    reply = server.send("POST", path, raw)
    assert 200 <= reply.status < 500 or reply.status == 503, (raw, reply)
    if reply.status >= 400:
        error = json.loads(reply.body)["error"]
        assert error["code"] == reply.status
        assert error["message"]


@pytest.mark.slow
@pytest.mark.parametrize("path", PROMPTS)
@fuzz
@given(body=bodies)
def test_bodies_with_a_prompt(server: Running, path: str, body: dict[str, Any]) -> None:
    _check(server, path, json.dumps({**PROMPTS[path], **body}).encode())


@pytest.mark.parametrize("path", PROMPTS)
@fuzz
@given(body=values)
def test_any_json(server: Running, path: str, body: Any) -> None:
    _check(server, path, json.dumps(body).encode())


@fuzz
@given(raw=st.binary(max_size=60))
def test_any_bytes_as_a_body(server: Running, raw: bytes) -> None:
    _check(server, "/v1/completions", raw)


def test_deep_nesting(server: Running) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        raw = (opening * 100_000 + "1" + closing * 100_000).encode()
        _check(server, "/v1/completions", raw)
        _check(server, "/v1/chat/completions", b'{"messages":' + raw + b"}")


@fuzz
@given(raw=st.binary(min_size=1, max_size=80), cut=st.integers(0, 60))
def test_raw_bytes_on_the_socket(server: Running, raw: bytes, cut: int) -> None:
    """Garbage before, inside and instead of a request."""
    request = (
        b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n{"prompt":[5]}'
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(request[:cut] + raw)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(65536):
            answer += part
        assert b" 500 " not in answer.split(b"\r\n")[0]
