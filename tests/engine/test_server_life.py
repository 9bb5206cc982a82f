"""Disconnects, queues, limits, keys, faults of the engine, and what the other routes say."""

from __future__ import annotations

import json
import random
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from serving import Running, open_request, running, wait_until
from tiny import write_tokenizer
from vkengine.server.app import Limits
from vkengine.server.connection import Connection
from vkengine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    with running(FakeEngine(per_step=3), tokenizer, settings={"nonce": "n1"}) as server:
        yield server


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_slot_within_a_step(tokenizer: Tokenizer, stream: bool) -> None:
    engine = FakeEngine(step_s=0.05)
    with running(engine, tokenizer) as server:
        client = open_request(server, prompt=[5], max_tokens=400, stream=stream)
        wait_until(lambda: engine.steps >= 2)
        client.close()
        before = engine.steps
        wait_until(lambda: not engine.requests, 2)
        # The step under way, and one in which the news may arrive.
        assert engine.steps - before <= 2
        assert len(engine.aborted) == 1
        assert server.idle()
        assert server.complete(prompt=[5], max_tokens=2).status == 200


def test_a_disconnect_in_the_queue_never_reaches_the_engine(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(step_s=0.02, max_sequences=1)
    with running(engine, tokenizer) as server:
        first = open_request(server, prompt=[5], max_tokens=50, stream=True)
        wait_until(lambda: bool(engine.requests))
        second = open_request(server, prompt=[6], max_tokens=50, stream=True)
        wait_until(lambda: server.driver.waiting == 1)
        second.close()
        wait_until(lambda: server.driver.waiting == 0)
        first.close()
        wait_until(server.idle)
        assert engine.admitted == [[5]]


def test_a_full_queue_is_a_counted_503(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(step_s=0.02, max_sequences=1)
    with running(engine, tokenizer, limits=Limits(max_waiting=1)) as server:
        clients = [open_request(server, prompt=[5], max_tokens=300)]
        wait_until(lambda: bool(engine.requests))
        clients.append(open_request(server, prompt=[6], max_tokens=300))
        wait_until(lambda: server.driver.waiting == 1)
        reply = server.complete(prompt=[7])
        assert reply.status == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json["error"]["type"] == "ServiceUnavailableError"
        assert "vk:request_rejected_total{" in server.send("GET", "/metrics").body.decode()
        assert server.driver.rejected == 1
        too_many = server.complete(prompt=[7], n=3)
        assert too_many.status == 400  # waiting cannot help
        for client in clients:
            client.close()
        wait_until(server.idle)
        assert server.complete(prompt=[7]).status == 200


def test_the_queue_is_first_come_first_served(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(step_s=0.005, max_sequences=2)
    with running(engine, tokenizer) as server:
        clients = []
        for i in range(12):
            clients.append(open_request(server, prompt=[100 + i], max_tokens=6))
            wait_until(lambda: len(engine.admitted) + server.driver.waiting == len(clients))
        wait_until(server.idle)
        assert engine.admitted == [[100 + i] for i in range(12)]
        assert engine.most_running == 2
        for client in clients:
            client.close()


def test_an_engine_out_of_memory_keeps_requests_waiting(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(full_at=2, step_s=0.005)
    with running(engine, tokenizer) as server, ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda i: server.complete(prompt=[i], max_tokens=9), range(6)))
        assert [reply.status for reply in replies] == [200] * 6
        assert engine.most_running == 2


def test_a_request_that_never_fits_is_refused(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(full_at=-1)
    with running(engine, tokenizer) as server:
        reply = server.complete(prompt=[5])
        assert reply.status == 503
        assert "retry-after" in reply.headers
        assert server.idle()
        text = server.send("GET", "/metrics").body.decode()
        assert 'vk:request_rejected_total{model_name="fake",engine="0"} 1' in text


def test_many_clients_lose_and_double_no_token(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(max_sequences=8, per_step=2)
    rng = random.Random(0)
    with running(engine, tokenizer) as server, ThreadPoolExecutor(24) as pool:

        def one(i: int) -> None:
            body = {"prompt": [1 + i % 300, 7], "seed": i, "max_tokens": 20 + i % 30}
            if i % 5 == 0:
                client = open_request(server, **body, stream=True)
                time.sleep(rng.random() * 0.01)
                client.close()
                return
            reply = server.complete(**body, stream=True, return_token_ids=True)
            got = [t for c in reply.chunks for t in c["token_ids"]]
            probe = FakeEngine(per_step=1000)
            from vkengine.sampling import SamplingParams

            params = SamplingParams(max_tokens=body["max_tokens"], seed=i)
            probe.add("x", body["prompt"], params)
            assert got == probe.step()[0].token_ids

        list(pool.map(one, range(200)))
        wait_until(server.idle)
        assert not engine.requests


def test_time_limit_is_a_408_or_an_error_event(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(step_s=0.02)
    with running(engine, tokenizer, limits=Limits(request_s=0.1)) as server:
        body = {"prompt": [5], "max_tokens": 400}
        reply = server.complete(**body)
        assert (reply.status, reply.json["error"]["type"]) == (408, "RequestTimeoutError")
        stream = server.complete(**body, stream=True)
        assert stream.status == 200
        assert stream.events[-1]["error"]["code"] == 408
        wait_until(server.idle)
        assert len(engine.aborted) == 2


def test_size_limit(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(), tokenizer, limits=Limits(body_bytes=1000)) as server:
        reply = server.complete(prompt="x" * 1000)
        assert (reply.status, reply.json["error"]["code"]) == (413, 413)
        head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head + b"7d0\r\n" + b"x" * 2000 + b"\r\n0\r\n\r\n")
            assert b" 413 " in client.recv(100)


def test_a_body_that_never_comes(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(), tokenizer, limits=Limits(body_s=0.1)) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{"
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head)
            assert b" 408 " in client.recv(100)


def test_a_dead_engine_answers_500_and_fails_health(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(fail_after=2), tokenizer) as server:
        assert server.send("GET", "/health").status == 200
        stream = server.complete(prompt=[5], max_tokens=9, stream=True)
        assert stream.events[-1]["error"]["type"] == "InternalServerError"
        assert "/srv" not in json.dumps(stream.events[-1])
        assert server.complete(prompt=[5]).status == 500
        assert server.send("GET", "/health").status == 503


def test_api_key(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(), tokenizer, api_key="sesame") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
            reply = server.send("GET", "/v1/models", headers=headers)
            assert reply.status == 401
            assert reply.json["error"]["type"] == "AuthenticationError"
            assert "sesame" not in reply.body.decode()
        assert server.send("POST", "/tokenize", {"prompt": "a"}).status == 401
        good = {"Authorization": "Bearer sesame"}
        assert server.send("GET", "/v1/models", headers=good).status == 200
        assert server.send("GET", "/health").status == 200


def test_models(server: Running) -> None:
    (card,) = server.send("GET", "/v1/models").json["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 512)
    assert server.send("GET", "/v1/models/fake").json == card
    assert server.send("GET", "/v1/models/other").status == 404


def test_settings_come_from_engine_and_server(server: Running) -> None:
    settings = server.send("GET", "/v1/settings").json
    assert (settings["profile"], settings["nonce"]) == ("vkae", "n1")


def test_tokenize_and_back(server: Running, tokenizer: Tokenizer) -> None:
    text = "The cat 😀"
    reply = server.send("POST", "/tokenize", {"prompt": text, "model": "fake"}).json
    assert reply == {
        "tokens": tokenizer.encode(text),
        "count": len(tokenizer.encode(text)),
        "max_model_len": 512,
    }
    assert server.send("POST", "/detokenize", {"tokens": reply["tokens"]}).json == {"prompt": text}
    assert server.send("POST", "/tokenize", {"prompt": text, "modle": "x"}).status == 400


def test_unknown_routes_and_methods_are_openai_errors(server: Running) -> None:
    reply = server.send("GET", "/v2/completions")
    assert (reply.status, reply.json["error"]["type"]) == (404, "NotFoundError")
    reply = server.send("GET", "/v1/completions")
    assert (reply.status, reply.json["error"]["code"]) == (405, 405)


def test_small_routes(server: Running) -> None:
    assert server.send("GET", "/ping").status == 200
    assert re.fullmatch(r"\d+\.\d+\.\d+", server.send("GET", "/version").json["version"])
    assert server.send("GET", "/load").json == {"server_load": 0}
    paths = server.send("GET", "/openapi.json").json["paths"]
    assert "/v1/chat/completions" in paths


def test_metrics_are_prometheus_and_count(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(per_step=2), tokenizer) as server:
        server.complete(prompt=[5, 6, 7], max_tokens=8)
        server.complete(prompt=[5], max_tokens=3, n=2, stream=True)
        text = server.send("GET", "/metrics").body.decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake"
            key = sample.labels.get("position") or sample.labels.get("finished_reason", "")
            if "le" not in sample.labels:
                samples[sample.name, key] = sample.value
    assert samples["vk:prompt_tokens_total", ""] == 5
    assert samples["vk:generation_tokens_total", ""] == 14
    assert samples["vk:request_success_total", "length"] == 3
    assert samples["vk:time_to_first_token_seconds_count", ""] == 3
    assert samples["vk:inter_token_latency_seconds_count", ""] == 8
    assert samples["vk:e2e_request_latency_seconds_count", ""] == 3
    assert samples["vk:request_queue_time_seconds_count", ""] == 3
    assert samples["vk:num_requests_running", ""] == 0
    assert samples["vk:num_requests_waiting", ""] == 0
    assert samples["vk:kv_cache_usage_perc", ""] == 0.25
    assert samples["vk:prefix_cache_queries_total", ""] == 0
    assert samples["vllm:spec_decode_num_drafts_total", ""] == 5
    assert samples["vllm:spec_decode_num_draft_tokens_total", ""] == 15
    assert samples["vllm:spec_decode_num_accepted_tokens_total", ""] == 9
    assert samples["vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 3


def test_closing_ends_open_streams_and_the_engine(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(step_s=0.05)
    with running(engine, tokenizer) as server:
        client = open_request(server, prompt=[5], max_tokens=400, stream=True)
        wait_until(lambda: engine.steps > 1)
    assert engine.closed
    assert not server.driver._thread.is_alive()
    client.settimeout(5)
    received = b""
    while part := client.recv(65536):
        received += part
    client.close()
    assert b'"code": 503' in received
    assert b"data: [DONE]" in received


@pytest.mark.parametrize("http", [Connection, "httptools"])
def test_a_slow_reader_gets_every_chunk_once(tokenizer: Tokenizer, http: Any) -> None:
    """Past uvicorn's own send (our connection) and through it: what does not fit waits."""
    ids = [1 + i % 300 for i in range(20_000)]
    engine = FakeEngine(max_model_len=len(ids) + 10, per_step=40, script=ids)
    with running(engine, tokenizer, http=http, send_buffer=4096) as server:
        body = {"prompt": [5], "ignore_eos": True, "stream": True, "return_token_ids": True}
        client = open_request(server, **body, max_tokens=len(ids))
        wait_until(lambda: engine.admitted and not engine.requests)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += client.recv(65536)
        client.close()
    events = [json.loads(event) for event in re.findall(rb"data: ({.*})\n", received)]
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == ids
