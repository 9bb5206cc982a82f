"""The `openai` package, unchanged, against the server: sync, async, streams, chat, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from fake_engine import FakeEngine
from serving import Running, running
from tiny import write_tokenizer
from vkengine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    with running(FakeEngine(per_step=2), tokenizer, api_key="sesame") as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="sesame", max_retries=0) as client:
        yield client


MESSAGES = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "The cat?"}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"


def test_completion_and_stream_agree(client: openai.OpenAI) -> None:
    """E61: counts are those of the emitted ids."""
    extra = {"return_token_ids": True, "top_k": 5, "min_tokens": 2}
    whole = client.completions.create(
        model="fake", prompt="The cat", max_tokens=9, seed=1, logprobs=2, extra_body=extra
    )
    stream = client.completions.create(
        model="fake",
        prompt="The cat",
        max_tokens=9,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
    ids = [i for chunk in chunks[:-1] for i in chunk.choices[0].model_extra["token_ids"]]
    assert text == whole.choices[0].text
    assert ids == whole.choices[0].model_extra["token_ids"]
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(ids) == 9
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or []) == 9


def test_chat_and_stream_agree(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    whole = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_completion_tokens=9, seed=1
    )
    stream = client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=9,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    rendered = "<|system|>Be brief\n<|user|>The cat?\n<|assistant|>"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(tokenizer.encode(rendered))


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=5, n=2, logprobs=True, top_logprobs=3
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 5
        assert len(choice.logprobs.content[0].top_logprobs) == 3
        assert isinstance(choice.logprobs.content[0].bytes, list)


def test_chat_without_a_limit_fills_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512


def test_text_parts_are_joined(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "The "}, {"type": "text", "text": "cat?"}]
    messages = [MESSAGES[0], {"role": "user", "content": parts}]
    one = client.chat.completions.create(model="fake", messages=messages, seed=1, max_tokens=5)
    two = client.chat.completions.create(model="fake", messages=MESSAGES, seed=1, max_tokens=5)
    assert one.choices[0].message.content == two.choices[0].message.content


def test_errors_map_to_the_clients_classes(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="fake", prompt="a", extra_body={"beam": 3})
    assert refused.value.param == "beam"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="fake", prompt="a", temperature=-1.0)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-17", prompt="a")
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="fake", messages=MESSAGES, tools=tools)
    assert refused.value.param == "tools"


def test_async_streams_side_by_side(server: Running) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> tuple[str, int]:
        stream = await client.completions.create(
            model="fake",
            prompt="The cat",
            max_tokens=20,
            seed=seed,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, count = "", 0
        async for chunk in stream:
            text += "".join(choice.text for choice in chunk.choices)
            count = chunk.usage.completion_tokens if chunk.usage else 0
        return text, count

    async def many() -> list[tuple[str, int]]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="sesame", max_retries=0) as client:
            return await asyncio.gather(*(one(client, seed % 4) for seed in range(16)))

    results = asyncio.run(many())
    assert all(count == 20 for _, count in results)
    assert [text for text, _ in results[:4]] * 4 == [text for text, _ in results]


def test_no_chat_template_is_a_clear_400(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=False)
    with running(FakeEngine(), Tokenizer(tmp_path)) as server:
        reply = server.chat(messages=MESSAGES)
        assert reply.status == 400
        assert "no chat template" in reply.json["error"]["message"]
        assert reply.json["error"]["param"] == "messages"


def test_a_template_that_refuses_is_a_400(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=False)
    template = "{{ raise_exception('roles must alternate') }}"
    (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
    with running(FakeEngine(), Tokenizer(tmp_path)) as server:
        reply = server.chat(messages=MESSAGES)
        assert (reply.status, "must alternate" in reply.body.decode()) == (400, True)


def test_chat_template_arguments_reach_the_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=False)
    template = "{% if enable_thinking %}think {% endif %}{{ messages[0].content }}"
    (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
    with running(FakeEngine(), Tokenizer(tmp_path)) as server:
        plain = server.chat(messages=MESSAGES).json["usage"]["prompt_tokens"]
        body = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": True}}
        assert server.chat(**body).json["usage"]["prompt_tokens"] > plain
