"""`/v1/completions` over a fake engine: shapes, counts, fields honoured or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import EOS, FakeEngine
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
    with running(FakeEngine(per_step=3), tokenizer) as server:
        yield server


def test_streamed_ids_equal_whole_ids_and_usage(server: Running) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 10, "seed": 1, "return_token_ids": True}
    whole = server.complete(**body).json
    stream = server.complete(**body, stream=True, stream_options={"include_usage": True})
    chunks = stream.chunks
    ids = [i for chunk in chunks for i in chunk["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    assert len(ids) == 10
    assert [len(chunk["token_ids"]) for chunk in chunks] == [3, 3, 3, 1]  # one chunk a step
    assert "".join(chunk["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert chunks[0]["prompt_token_ids"] == [5, 6, 7]
    assert [chunk["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    last = stream.events[-1]
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}
    assert last["metrics"]["speculative_decoding"] == {
        "num_drafts": 5,
        "num_draft_tokens": 15,
        "num_accepted_tokens": 9,
        "num_accepted_tokens_per_pos": [4, 3, 2],
    }
    assert last["metrics"]["seed"] == 1


def test_no_usage_event_unless_asked(server: Running) -> None:
    stream = server.complete(prompt=[5], stream=True)
    assert all(event["choices"] for event in stream.events)
    assert "token_ids" not in stream.chunks[0]
    assert stream.headers["content-type"].startswith("text/event-stream")


def test_continuous_usage_counts_up(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = server.complete(prompt=[5], max_tokens=7, stream=True, stream_options=options)
    assert [e["usage"]["completion_tokens"] for e in stream.events] == [3, 6, 7, 7]


def test_default_is_sixteen_tokens(server: Running) -> None:
    assert server.complete(prompt="The cat").json["usage"]["completion_tokens"] == 16


def test_a_drawn_seed_is_reported_and_reproduces(server: Running) -> None:
    first = server.complete(prompt=[5], return_token_ids=True).json
    again = server.complete(prompt=[5], return_token_ids=True, seed=first["metrics"]["seed"]).json
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    other = server.complete(prompt=[5], return_token_ids=True).json
    assert other["metrics"]["seed"] != first["metrics"]["seed"]


@pytest.mark.parametrize("stream", [False, True])
def test_arrays_of_prompts_times_n(server: Running, tokenizer: Tokenizer, stream: bool) -> None:
    prompts = ["The cat", "on the mat"]
    options = {"stream_options": {"include_usage": True}} if stream else {}
    reply = server.complete(
        prompt=prompts, n=2, max_tokens=5, seed=3, return_token_ids=True, stream=stream, **options
    )
    if stream:
        choices: dict[int, list[int]] = {}
        for chunk in reply.chunks:
            choices.setdefault(chunk["index"], []).extend(chunk["token_ids"])
        usage = reply.events[-1]["usage"]
    else:
        choices = {c["index"]: c["token_ids"] for c in reply.json["choices"]}
        usage = reply.json["usage"]
    assert sorted(choices) == [0, 1, 2, 3]
    assert len({tuple(ids) for ids in choices.values()}) == 4  # each choice draws its own
    prompt_tokens = sum(len(tokenizer.encode(prompt)) for prompt in prompts)
    assert usage["prompt_tokens"] == prompt_tokens  # counted once, not n times
    assert usage["completion_tokens"] == 20
    alone = server.complete(prompt=prompts[1], seed=3, max_tokens=5, return_token_ids=True).json
    assert choices[2] == alone["choices"][0]["token_ids"]


def test_list_of_token_lists(server: Running) -> None:
    reply = server.complete(prompt=[[5, 6], [7]], max_tokens=2).json
    assert [c["index"] for c in reply["choices"]] == [0, 1]
    assert reply["usage"]["prompt_tokens"] == 3


def test_echo_returns_the_prompt_first(server: Running) -> None:
    plain = server.complete(prompt="The cat", seed=1, max_tokens=4).json["choices"][0]["text"]
    echo = server.complete(prompt="The cat", seed=1, max_tokens=4, echo=True)
    assert echo.json["choices"][0]["text"] == "The cat" + plain
    stream = server.complete(prompt="The cat", seed=1, max_tokens=4, echo=True, stream=True)
    assert "".join(c["text"] for c in stream.chunks) == "The cat" + plain


def test_echo_of_no_new_tokens_scores_the_prompt(server: Running, tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode("The cat"))
    reply = server.complete(prompt="The cat", max_tokens=0, echo=True, logprobs=2).json
    assert reply["choices"][0]["text"] == "The cat"
    logprobs = reply["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == count
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == [-1.5] * (count - 1)
    assert reply["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_one_entry_a_token_e60(server: Running, stream: bool) -> None:
    reply = server.complete(prompt=[5], max_tokens=7, logprobs=2, stream=stream)
    choices = reply.chunks if stream else reply.json["choices"]
    tokens = [t for c in choices for t in c["logprobs"]["tokens"]]
    values = [v for c in choices for v in c["logprobs"]["token_logprobs"]]
    tops = [t for c in choices for t in c["logprobs"]["top_logprobs"]]
    offsets = [o for c in choices for o in c["logprobs"]["text_offset"]]
    assert len(tokens) == len(values) == len(tops) == 7
    assert offsets == [sum(len(t) for t in tokens[:i]) for i in range(7)]
    assert all(-1.5 in top.values() and -0.5 in top.values() for top in tops)


def test_prompt_scoring_with_logits(server: Running) -> None:
    body = {"prompt": [5, 9, 1], "max_tokens": 1, "prompt_logprobs": 2}
    scores = server.complete(**body).json["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert scores[1] == {
        "0": {"logprob": -0.5, "rank": 1},
        "1": {"logprob": -1.5, "rank": 2},
        "9": {"logprob": -1.5, "rank": 7},
    }
    assert len(scores[2]) == 2  # the actual token is among the best two
    scores = server.complete(**body, prompt_logits=True).json["choices"][0]["prompt_logprobs"]
    assert scores[1]["9"] == {"logprob": -1.5, "rank": 7, "logit": 0.5}


def test_tokens_as_ids(server: Running) -> None:
    body = {"prompt": [5], "max_tokens": 2, "logprobs": 0, "return_tokens_as_token_ids": True}
    choice = server.complete(**body, return_token_ids=True).json["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_eos_ends_the_text_without_showing(tokenizer: Tokenizer) -> None:
    letters = tokenizer.encode("cat")
    engine = FakeEngine(script=[*letters, EOS, *letters], per_step=2)
    with running(engine, tokenizer) as server:
        choice = server.complete(prompt=[5], return_token_ids=True).json["choices"][0]
        assert choice["text"] == "cat"
        assert choice["token_ids"] == [*letters, EOS]
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] is None
        on = server.complete(prompt=[5], ignore_eos=True, max_tokens=9).json
        assert on["usage"]["completion_tokens"] == 9
        # The script repeats every 2L + 1 tokens: past min_tokens the next end is at 3L + 2.
        length = len(letters)
        later = server.complete(prompt=[5], min_tokens=length + 2, max_tokens=40).json
        assert later["usage"]["completion_tokens"] == 3 * length + 2


def test_stop_token_id_is_named(tokenizer: Tokenizer) -> None:
    script = [*tokenizer.encode("cat"), 42]
    with running(FakeEngine(script=script), tokenizer) as server:
        choice = server.complete(prompt=[5], stop_token_ids=[42]).json["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 42)
        assert choice["text"] == "cat"
        body = {"prompt": [5], "stop_token_ids": [42], "include_stop_str_in_output": True}
        shown = server.complete(**body).json["choices"][0]
        assert shown["text"] == "cat" + tokenizer.token_text(42)


REFUSED = [
    ({"temprature": 1.0}, "temprature", "did you mean 'temperature'"),
    ({"draft": {"metod": "mtp"}}, "metod", "did you mean 'method'"),
    ({"draft": {"method": "oracle"}}, "draft.method", ""),
    ({"draft": {"method": "mtp", "k": 9}}, "draft.k", ""),
    ({"temperature": -1}, "temperature", ""),
    ({"temperature": "1"}, "temperature", ""),
    ({"top_p": 0}, "top_p", ""),
    ({"top_k": -2}, "top_k", ""),
    ({"max_tokens": True}, "max_tokens", ""),
    ({"max_tokens": 1.5}, "max_tokens", ""),
    ({"max_tokens": 0}, "max_tokens", "echo"),
    ({"max_tokens": 512}, "max_tokens", "context of 512"),
    ({"min_tokens": 17}, "min_tokens", ""),
    ({"n": 0}, "n", ""),
    ({"best_of": 2}, "best_of", ""),
    ({"suffix": "x"}, "suffix", ""),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": ["a"] * 17}, "stop", ""),
    ({"seed": 2**63}, "seed", ""),
    ({"logit_bias": {"a": 1}}, "logit_bias", ""),
    ({"logit_bias": {"1": 101}}, "logit_bias", ""),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", ""),
    ({"prompt_logits": True}, "prompt_logits", ""),
    ({"prompt": []}, "prompt", ""),
    ({"prompt": ""}, "prompt", ""),
    ({"prompt": [320]}, "prompt", "vocabulary"),
    ({"prompt": [-1]}, "prompt", ""),
    ({"prompt": [[]]}, "prompt", ""),
    ({"prompt": [5] * 512}, "prompt", "context"),
    ({"prompt": {"a": 1}}, "prompt", ""),
    ({"logprobs": 21}, "logprobs", ""),
]


@pytest.mark.parametrize(("body", "param", "words"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(
    server: Running, body: dict, param: str, words: str
) -> None:
    reply = server.complete(**{"prompt": [5], **body})
    assert reply.status == 400
    error = reply.json["error"]
    assert error["param"].split(".")[0] == param.split(".")[0]
    assert words in error["message"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)


def test_prompt_is_required(server: Running) -> None:
    reply = server.send("POST", "/v1/completions", {})
    assert (reply.status, reply.json["error"]["param"]) == (400, "prompt")


def test_what_the_engine_refuses_is_a_400_even_in_a_stream(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(refuse=lambda p: "top_k: not on Mondays" if p.top_k == 7 else None)
    with running(engine, tokenizer) as server:
        for stream in (False, True):
            reply = server.complete(prompt=[5], top_k=7, stream=stream)
            assert reply.status == 400
            assert reply.json["error"]["param"] == "top_k"
        assert server.complete(prompt=[5], top_k=8).status == 200
        assert server.idle()


def test_unknown_model_is_404(server: Running) -> None:
    reply = server.complete(prompt=[5], model="gpt-17")
    assert reply.status == 404
    assert reply.json["error"]["type"] == "NotFoundError"
    assert server.complete(prompt=[5], model="fake").status == 200


def test_without_a_tokenizer_only_ids_are_served() -> None:
    with running(FakeEngine()) as server:
        assert server.complete(prompt="hello").json["error"]["param"] == "prompt"
        assert server.complete(prompt=[5], stop="x").json["error"]["param"] == "stop"
        assert server.send("POST", "/tokenize", {"prompt": "a"}).status == 400
        choice = server.complete(prompt=[5], return_token_ids=True).json["choices"][0]
        assert len(choice["token_ids"]) == 16
        assert choice["text"] == ""


def test_sampling_fields_reach_the_engine(tokenizer: Tokenizer) -> None:
    seen = []
    engine = FakeEngine(refuse=lambda params: seen.append(params))
    with running(engine, tokenizer) as server:
        server.complete(
            prompt=[5],
            temperature=0.5,
            top_p=0.9,
            top_k=-1,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=-0.3,
            logit_bias={"7": -100},
            seed=-4,
            max_tokens=3,
            min_tokens=2,
            stop_token_ids=[9],
            ignore_eos=True,
            draft={"method": "mtp", "k": 3, "head_rows": 64, "acceptance": {"synthetic": 0.8}},
        )
    (params,) = seen
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 0, 0.1)
    assert params.repetition_penalty == 1.1
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, -0.3)
    assert params.logit_bias == {7: -100}
    assert (params.seed, params.max_tokens, params.min_tokens) == (-4, 3, 2)
    assert (params.stop_token_ids, params.ignore_eos) == ((9,), True)
    draft = params.draft
    assert (draft.method, draft.k, draft.head_rows, draft.acceptance) == ("mtp", 3, 64, 0.8)


def test_bodies_that_are_not_json(server: Running) -> None:
    for body in (
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"prompt": NaN}',
        b"\xff\xfe",
        b'{"prompt":"\\ud800"}',
    ):
        reply = server.send("POST", "/v1/completions", body)
        assert reply.status == 400, body
        assert json.loads(reply.body)["error"]["code"] == 400
