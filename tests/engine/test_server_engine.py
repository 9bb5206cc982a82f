"""The server over the real engine and vk-tiny: drafts, batches, aborts and scores by HTTP."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import Running, open_request, running, wait_until
from vkengine.digest import checkpoint_folder
from vkengine.load import load_engine
from vkengine.sampling import Draft
from vkengine.stock_model import load_stock
from vkengine.tokenizer import Tokenizer

PROMPT = "def read_lines(path):\n    "
DRAFTS = [
    {"method": "none"},
    {"method": "mtp", "k": 1},
    {"method": "mtp", "k": 3},
    {"method": "mtp", "k": "auto"},
    {"method": "ngram", "k": 4},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    folder = checkpoint_folder("vk-tiny")
    assert folder is not None
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    engine = load_engine(
        "vk-tiny", device="cpu", threads=1, max_sequences=4, default_draft=Draft("mtp", 3)
    )
    with running(engine, tokenizer) as server:
        yield server


def _choice(server: Running, **body: Any) -> dict[str, Any]:
    reply = server.complete(**{"prompt": PROMPT, "return_token_ids": True, **body})
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "seed": 11},
        {
            "temperature": 1.0,
            "top_k": 40,
            "min_p": 0.02,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.1,
            "logit_bias": {"7": 2.0},
            "seed": 5,
        },
    ],
    ids=["greedy", "top-p", "everything"],
)
def test_drafts_change_no_token(server: Running, sampling: dict[str, Any]) -> None:
    answers = [
        _choice(server, **sampling, draft=draft, max_tokens=40, ignore_eos=True) for draft in DRAFTS
    ]
    assert all(answer["token_ids"] == answers[0]["token_ids"] for answer in answers)
    assert all(answer["text"] == answers[0]["text"] for answer in answers)


def test_a_drafted_stream_reports_its_acceptance(server: Running) -> None:
    reply = server.complete(
        prompt=PROMPT,
        temperature=0.0,
        max_tokens=40,
        ignore_eos=True,
        stream=True,
        return_token_ids=True,
        stream_options={"include_usage": True},
    )
    sizes = [len(chunk["token_ids"]) for chunk in reply.chunks]
    spec = reply.events[-1]["metrics"]["speculative_decoding"]
    assert sum(sizes) == 40
    assert max(sizes) > 1  # several tokens a step
    assert spec["num_drafts"] == len(sizes) - 1  # every round but the prefill's
    assert spec["num_accepted_tokens"] == sum(spec["num_accepted_tokens_per_pos"])
    # Drafts past the limit are counted, the tokens they would have made are not sent.
    assert 1 + spec["num_drafts"] + spec["num_accepted_tokens"] >= 40


def test_stop_string_inside_a_round_e56(server: Running) -> None:
    """Turn 2 after a cut round equals a cold run of the same prompt."""
    body = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    whole = _choice(server, **body)
    stop = whole["text"][12:15]
    cut = _choice(server, **body, stop=stop)
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    reply = server.complete(
        prompt=PROMPT, **body, stop=stop, stream=True, stream_options={"include_usage": True}
    )
    spec = reply.events[-1]["metrics"]["speculative_decoding"]
    # The same rounds as without the stop string, up to the one that it cut.
    assert spec["num_drafts"] == len(reply.chunks) - 1 > 0
    assert spec["num_accepted_tokens"] == sum(spec["num_accepted_tokens_per_pos"])
    assert 1 + spec["num_drafts"] + spec["num_accepted_tokens"] >= len(cut["token_ids"])
    wait_until(server.idle)
    turn = PROMPT + cut["text"] + "x = 1\n"
    warm = _choice(server, **body, prompt=turn)
    cold = _choice(server, **body, prompt=turn, draft={"method": "none"})
    assert warm["token_ids"] == cold["token_ids"]


def test_alone_equals_in_a_crowd(server: Running) -> None:
    def one(i: int) -> list[int]:
        body = {"temperature": 0.8, "seed": i, "max_tokens": 8 + 3 * i}
        return _choice(server, **body, prompt=f"{PROMPT}{i} = ", ignore_eos=True)["token_ids"]

    alone = [one(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(8))) == alone


def test_a_disconnect_frees_the_slot(server: Running) -> None:
    engine = server.engine
    wait_until(server.idle)
    clients = [
        open_request(server, prompt=PROMPT, max_tokens=3000, ignore_eos=True, stream=True)
        for _ in range(4)
    ]
    wait_until(lambda: len(engine._running) == 4)
    for client in clients:
        client.close()
    began = time.monotonic()
    wait_until(lambda: len(engine._free) == 4)
    assert time.monotonic() - began < 5
    assert _choice(server, max_tokens=3)["token_ids"]


def test_engine_refusals_name_the_field(server: Running) -> None:
    for body, name in (
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"logit_bias": {"99999": 1.0}}, "logit_bias"),
    ):
        reply = server.complete(prompt=PROMPT, **body)
        assert (reply.status, reply.json["error"]["param"]) == (400, name)


def test_synthetic_acceptance_is_honoured(server: Running) -> None:
    draft = {"method": "mtp", "k": 3, "acceptance": {"synthetic": 1.0}}
    reply = server.complete(prompt=PROMPT, max_tokens=32, ignore_eos=True, draft=draft).json
    spec = reply["metrics"]["speculative_decoding"]
    assert spec["num_accepted_tokens"] == spec["num_draft_tokens"] > 0


def test_stock_scores_what_the_engine_wrote(server: Running, tokenizer: Tokenizer) -> None:
    """Each greedy token is stock's argmax or within the fp32 tie bound of it."""
    prompt = tokenizer.encode(PROMPT)
    made = _choice(server, prompt=prompt, temperature=0.0, max_tokens=60, ignore_eos=True)
    ids = made["token_ids"]
    with running(load_stock("vk-tiny", device="cpu", threads=1), tokenizer) as stock:
        choice = _choice(
            stock, prompt=prompt + ids, max_tokens=1, prompt_logprobs=2, prompt_logits=True
        )
        ours = _choice(
            server, prompt=prompt + ids, max_tokens=1, prompt_logprobs=2, prompt_logits=True
        )
    entries = choice["prompt_logprobs"]
    assert len(entries) == len(prompt) + len(ids)
    for token_id, entry in zip(ids, entries[len(prompt) :], strict=True):
        best = max(score["logit"] for score in entry.values())
        assert best - entry[str(token_id)]["logit"] <= 1e-3
    for theirs, mine in zip(entries[1:], ours["prompt_logprobs"][1:], strict=True):
        for token_id in theirs.keys() & mine.keys():
            assert mine[token_id]["logit"] == pytest.approx(theirs[token_id]["logit"], abs=1e-3)


def test_logprobs_through_rounds_e60(server: Running) -> None:
    body = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, "logprobs": 2}
    drafted = _choice(server, **body)["logprobs"]
    plain = _choice(server, **body, draft={"method": "none"})["logprobs"]
    assert len(drafted["token_logprobs"]) == 30
    assert drafted == plain


def test_chat_drafts_change_no_token_e62(server: Running, tmp_path: Path) -> None:
    folder = checkpoint_folder("vk-tiny")
    assert folder is not None
    shutil.copy(folder / "tokenizer.json", tmp_path)
    template = "{% for m in messages %}# {{ m.content }}\n{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
    with running(server.engine, Tokenizer(tmp_path)) as chatting:
        body = {
            "messages": [{"role": "user", "content": "read a file"}],
            "temperature": 0.0,
            "max_tokens": 30,
            "return_token_ids": True,
        }
        answers = [
            chatting.chat(**body, draft=draft, stream=stream)
            for draft in DRAFTS
            for stream in (False, True)
        ]
        plain = answers[0].json["choices"][0]
        for whole, stream in zip(answers[::2], answers[1::2], strict=True):
            choice = whole.json["choices"][0]
            assert choice["token_ids"] == plain["token_ids"]
            deltas = [c["delta"].get("content", "") for c in stream.chunks]
            assert "".join(deltas) == choice["message"]["content"]


def test_usage_of_one_and_three_tokens_e58(server: Running) -> None:
    for count in (1, 3):
        stream = server.complete(
            prompt=PROMPT,
            max_tokens=count,
            temperature=0.0,
            ignore_eos=True,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert "".join(chunk["text"] for chunk in stream.chunks)
        assert stream.events[-1]["usage"]["completion_tokens"] == count
