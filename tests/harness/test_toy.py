"""The toy server: honest when asked to be, and wrong in exactly the way that was asked for."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finalbench.errors import EnvironmentMissing, UsageError
from finalbench.testing.behaviour import PRESETS, parse_behaviour
from finalbench.testing.launch import ToyThread, start_toy, toy
from finalbench.testing.toy_model import EOS, VOCAB_SIZE, decode_bytes, encode
from finalbench.testing.toy_state import ToyState

FAST = "step_ms=0,prefill_ms=0"


@pytest.fixture(scope="module")
def server() -> Iterator[ToyThread]:
    with ToyThread() as running:
        yield running


def post(url: str, path: str = "/v1/completions", **body: object) -> httpx2.Response:
    return httpx2.post(f"{url}{path}", json=body, timeout=20.0)


def tokens(url: str, prompt: list[int], count: int = 12, **fields: object) -> list[int]:
    answer = post(url, prompt=prompt, max_tokens=count, return_token_ids=True, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_a_behaviour_is_a_name_and_knobs() -> None:
    assert parse_behaviour("chunks").tokens_per_chunk == 4
    mixed = parse_behaviour("cut_stream, cut_after=9,usage=wrong")
    assert (mixed.cut_after, mixed.usage) == (9, "wrong")
    assert parse_behaviour("ok,pattern=1:4:2").chunk_sizes() == [1, 4, 2]
    for name in PRESETS:
        parse_behaviour(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cut_steam", "nearest is 'cut_stream'"),
        ("ok,cut_aftr=3", "nearest is 'cut_after'"),
        ("ok,cut_after", "is not key=value"),
        ("ok,cut_after=soon", "cut_after"),
        ("ok,usage=maybe", "usage"),
    ],
)
def test_a_misspelt_behaviour_names_the_nearest(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_behaviour(text)


@given(st.text(max_size=80))
def test_tokens_hold_the_text(text: str) -> None:
    assert decode_bytes(encode(text)) == text.encode()
    assert decode_bytes(encode(text, merges=False)) == text.encode()
    assert len(encode(text)) <= len(text.encode())


def test_the_same_prefix_gives_the_same_tokens(server: ToyThread) -> None:
    """Greedy and seeded: over restarts, chunkings, drafts and neighbours."""
    url = server.use(f"ok,{FAST}")
    greedy = tokens(url, [5, 6, 7], temperature=0)
    warm = tokens(url, [5, 6, 7], temperature=0.9, seed=4)
    assert len(set(greedy)) > 3 and greedy != warm
    assert tokens(url, [5, 6, 7], temperature=0.9, seed=5) != warm
    url = server.use(f"chunks,{FAST}")
    assert tokens(url, [5, 6, 7], temperature=0) == greedy
    assert tokens(url, [5, 6, 7, *greedy[:4]], 8, temperature=0) == greedy[4:]
    draft = {"method": "ngram", "k": 2}
    assert tokens(url, [5, 6, 7], temperature=0.9, seed=4, draft=draft) == warm
    both = post(
        url, prompt=[[5, 6, 7], [1]], max_tokens=12, temperature=0, return_token_ids=True
    ).json()
    assert both["choices"][0]["token_ids"] == greedy
    assert both["usage"]["completion_tokens"] == 24


def test_sampler_fields_act(server: ToyThread) -> None:
    """Each narrows the choice to the best token when it is at its end."""
    url = server.use(f"ok,{FAST}")
    greedy = tokens(url, [9, 9], 30, temperature=0)
    assert tokens(url, [9, 9], 30, temperature=1.5, seed=1) != greedy
    for field in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        assert tokens(url, [9, 9], 30, temperature=1.5, seed=1, **field) == greedy


def test_scores_are_those_of_the_stream(server: ToyThread) -> None:
    """Greedy output is the scorer's argmax at every position; a wrong token is not."""
    url = server.use(f"ok,{FAST}", profile="stock")
    prompt = [1, 2, 3]
    honest = tokens(url, prompt, temperature=0)
    wrong = tokens(server.use(f"wrong_token,{FAST}"), prompt, temperature=0)
    assert [a == b for a, b in zip(honest, wrong, strict=True)].index(False) == 7
    url = server.use(f"ok,{FAST}", profile="stock")
    for output, ranks in ((honest, [1] * 12), (wrong, [1] * 7 + [3] + [1] * 4)):
        rows = post(
            url, prompt=prompt + output, max_tokens=1, prompt_logprobs=2, prompt_logits=True
        ).json()["choices"][0]["prompt_logprobs"]
        assert rows[0] is None and len(rows) == 15
        found = [rows[3 + i][str(token)] for i, token in enumerate(output)]
        assert [entry["rank"] for entry in found] == ranks
        for row in rows[1:]:
            best = max(row.values(), key=lambda entry: entry["logit"])
            assert best["rank"] == 1
            assert 0.9 < sum(math.exp(entry["logprob"]) for entry in row.values()) <= 1.0 + 1e-9
            assert len(row) in (2, 3)


def test_ties_are_within_the_bound_and_only_the_engine_flips_them(server: ToyThread) -> None:
    """S02: an engineered tie is rank 2 by less than 1e-3 in logits."""
    prompt = [4, 4]
    engine = tokens(server.use(f"ties,tie_every=3,{FAST}"), prompt, 40, temperature=0)
    url = server.use(f"ties,tie_every=3,{FAST}", profile="stock")
    rows = post(
        url, prompt=prompt + engine, max_tokens=1, prompt_logprobs=2, prompt_logits=True
    ).json()["choices"][0]["prompt_logprobs"][2:]
    gaps = []
    for token, row in zip(engine, rows, strict=True):
        best = max(entry["logit"] for entry in row.values())
        gaps.append(best - row[str(token)]["logit"])
    assert 5 <= sum(gap > 0 for gap in gaps) <= 25
    assert max(gaps) < 1e-3


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperatur": 1}, "temperatur"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"n": 2}, "n"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"draft": {"method": "magic"}}, "draft"),
        ({"draft": {"method": "mtp", "k": 9}}, "draft"),
    ],
)
def test_what_is_not_honoured_is_named(
    server: ToyThread, fields: dict[str, object], named: str
) -> None:
    answer = post(server.use("ok"), **{"prompt": [1], "max_tokens": 1, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (named, 400)


def test_the_stock_profile_refuses_drafts_and_is_slower(server: ToyThread) -> None:
    url = server.use("ok", profile="stock")
    answer = post(url, prompt=[1], max_tokens=1, draft={"method": "mtp", "k": 1})
    assert answer.json()["error"]["param"] == "draft"
    same = tokens(url, [1], 20, temperature=0, draft={"method": "none", "k": 0})
    assert tokens(server.use("ok"), [1], 20, temperature=0) == same
    vk, stock = (ToyState(parse_behaviour("ok"), name, "toy") for name in ("vk", "stock"))
    assert stock.step_seconds(0, 1) == pytest.approx(5 * vk.step_seconds(0, 1))
    assert vk.step_seconds(3, 1) > vk.step_seconds(0, 1)


@pytest.mark.parametrize(
    ("behaviour", "fields", "honest"),
    [
        ("ignored_temperature", {"temperature": 0}, False),
        ("ignored_max_tokens", {"temperature": 0}, False),
        ("ok", {"temperature": 0}, True),
    ],
)
def test_ignored_fields_are_not_refused(
    server: ToyThread, behaviour: str, fields: dict[str, object], honest: bool
) -> None:
    expected = tokens(server.use(f"ok,{FAST}"), [3], 80, temperature=0)
    got = tokens(server.use(f"{behaviour},{FAST}"), [3], 80, **fields)
    assert (got == expected) == honest


def test_an_ignored_draft_shows_in_the_counters(server: ToyThread) -> None:
    draft = {"method": "mtp", "k": 3}
    for behaviour, drafted in (("ok", True), ("ignored_draft", False)):
        url = server.use(f"{behaviour},{FAST}")
        answer = post(url, prompt=[1], max_tokens=20, draft=draft).json()
        spec = answer["metrics"]["speculative_decoding"]
        assert (spec["num_drafts"] > 0) == drafted


def test_synthetic_acceptance_is_what_was_asked_for(server: ToyThread) -> None:
    url = server.use(f"ok,{FAST},draft_ms=0")
    for chance, low, high in ((0.0, 0.0, 0.0), (1.0, 3.0, 3.0), (0.5, 0.7, 1.05)):
        draft = {"method": "mtp", "k": 3, "acceptance": {"synthetic": chance}}
        spec = post(url, prompt=[8], max_tokens=2000, draft=draft).json()["metrics"]
        counts = spec["speculative_decoding"]
        assert low <= counts["num_accepted_tokens"] / counts["num_drafts"] <= high


def test_identity(server: ToyThread) -> None:
    """F05: nonce and model are what the process was given, or what the fault says."""
    with toy("ok", env={"VK_NONCE": "abc123"}) as process:
        settings = httpx2.get(f"{process.base_url}/v1/settings").json()
    assert (settings["nonce"], settings["profile"]) == ("abc123", "vk")
    wrong = httpx2.get(f"{server.use('wrong_nonce')}/v1/settings").json()
    assert wrong["nonce"] == "0" * 16
    url = server.use("wrong_model")
    assert httpx2.get(f"{url}/v1/models").json()["data"][0]["id"] == "another-model"
    assert post(url, model="toy", prompt=[1], max_tokens=1).status_code == 404


def state(behaviour: str) -> ToyState:
    return ToyState(parse_behaviour(behaviour), "vk", "toy")


def test_slow_first_shapes() -> None:
    """C07: the first request of each length bucket is slow, later ones are not."""
    toy_state = state("slow_first_shape,prefill_ms=1,slow_first_ms=50")
    times = [toy_state.prefill_seconds([1] * n, i) for i, n in enumerate((20, 20, 31, 40, 40), 1)]
    assert times == pytest.approx([0.051, 0.001, 0.001, 0.051, 0.001])


def test_warming_and_drift() -> None:
    """C08, C09, G02: times fall, or rise, from request to request."""
    warming = state("warming,warm_decay_ms=40,prefill_ms=1")
    times = [warming.prefill_seconds([1], request) for request in (1, 2, 3)]
    assert times == pytest.approx([0.041, 0.021, 0.011])
    drifting = state("drift,drift_per_request=0.5,step_ms=8")
    times = [drifting.step_seconds(0, request) for request in (1, 2, 3)]
    assert times == pytest.approx([0.008, 0.012, 0.016])
    ageing = state("ok,drift_per_s=1.0,step_ms=8")
    ageing.started -= 3.0
    assert ageing.step_seconds(0, 1) == pytest.approx(0.032, rel=0.05)


def test_slot_bias_by_start(tmp_path: Path) -> None:
    """G01: every other start is slower by the share, in prefill and decode."""
    text = f"slot_bias,slot_bias=0.2,slot_file={tmp_path / 'starts'},step_ms=10,prefill_ms=10"
    servers = [state(text) for _ in range(4)]
    assert [s.step_seconds(0, 1) for s in servers] == pytest.approx([0.012, 0.01, 0.012, 0.01])
    assert servers[0].prefill_seconds([1], 1) == pytest.approx(0.012)


def test_the_cache_speeds_up_what_it_holds() -> None:
    """C01: a repeated prompt costs a twentieth; an unseen one costs all of it."""
    toy_state = state("prefix_cache,prefill_ms=0,prefill_us_per_token=1000")
    prompt = list(range(64))
    assert toy_state.prefill_seconds(prompt, 1) == pytest.approx(0.064)
    assert toy_state.prefill_seconds(prompt, 2) == pytest.approx(0.0032)
    assert toy_state.prefill_seconds([9, *prompt[1:]], 3) == pytest.approx(0.064)
    assert toy_state.prefill_seconds([*prompt[:32], *([9] * 32)], 4) == pytest.approx(0.0336)
    assert toy_state.flush()
    assert toy_state.prefill_seconds(prompt, 5) == pytest.approx(0.064)


def test_counters_and_arrivals(server: ToyThread) -> None:
    """T18: what was sent is known at the server, so warm-ups can be counted."""
    url = server.use(f"ok,{FAST}")
    for length in (3, 5):
        tokens(url, [1] * length, 7)
    text = httpx2.get(f"{url}/metrics").text
    assert 'vk:prompt_tokens_total{model_name="toy",engine="0"} 8.0' in text
    assert 'vk:generation_tokens_total{model_name="toy",engine="0"} 14.0' in text
    stats = httpx2.get(f"{url}/toy/stats").json()
    assert stats["requests"] == 2 and len(set(stats["digests"])) == 2


def test_tokenize_and_back(server: ToyThread) -> None:
    url = server.use("ok")
    text = "def the model return: é"
    found = post(url, "/tokenize", prompt=text).json()
    assert found["count"] == len(found["tokens"]) == len(encode(text))
    assert post(url, "/detokenize", tokens=found["tokens"]).json() == {"prompt": text}
    assert post(url, "/tokenize", prompt=7).status_code == 400
    assert post(url, "/detokenize", tokens=[VOCAB_SIZE]).status_code == 400


def test_the_openai_package_understands_it(server: ToyThread) -> None:
    """Conformance: completions, chat, streams, usage and errors through the public client."""
    url = server.use(f"ok,{FAST}")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(model="toy", prompt="the model", max_tokens=6)
        assert whole.usage is not None and whole.usage.completion_tokens == 6
        parts = list(
            client.chat.completions.create(
                model="toy",
                messages=[{"role": "user", "content": "hello"}],
                max_completion_tokens=5,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == 5
        assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="toy", prompt="x", presence_penalty=1.0)
        assert caught.value.param == "presence_penalty"


def test_early_end_token(server: ToyThread) -> None:
    got = tokens(server.use(f"early_eos,{FAST}"), [1], 20, ignore_eos=True)
    assert len(got) == 5 and got[-1] == EOS


def test_a_process_that_dies_and_one_that_is_late() -> None:
    with toy("dies,die_after=1,step_ms=1") as process:
        assert post(process.base_url, prompt=[1], max_tokens=2).status_code == 200
        with (
            pytest.raises(httpx2.HTTPError),
            httpx2.stream(
                "POST",
                f"{process.base_url}/v1/completions",
                json={"prompt": [1], "max_tokens": 5, "stream": True},
            ) as answer,
        ):
            answer.read()
        assert process.process.wait(5) == 9
    with toy("ok,start_ms=700") as process:
        assert httpx2.get(f"{process.base_url}/health").status_code == 503
        time.sleep(0.8)
        assert httpx2.get(f"{process.base_url}/health").status_code == 200


def test_a_start_that_cannot_be_says_why() -> None:
    """A taken port and a bad behaviour: one line, exit code 3 and 2."""
    with toy() as first, pytest.raises(EnvironmentMissing, match=f"on 127.0.0.1:{first.port}"):
        start_toy(port=first.port)
    done = subprocess.run(
        [sys.executable, "-m", "finalbench.testing.toy", "--behaviour", "okay"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.strip() == "toy: unknown behaviour 'okay'; nearest is 'ok'"
    assert done.stdout == ""


def test_behaviour_can_change_while_running(server: ToyThread) -> None:
    url = server.use(f"ok,{FAST}")
    assert len(tokens(url, [1], 20)) == 20
    assert httpx2.post(f"{url}/toy/behaviour", content="early_eos").status_code == 200
    assert len(tokens(url, [1], 20)) == 5
    refused = httpx2.post(f"{url}/toy/behaviour", content="early")
    assert refused.status_code == 400
    assert "early_eos" in json.loads(refused.text)["error"]["message"]
