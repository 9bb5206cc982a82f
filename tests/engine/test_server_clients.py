"""Programs of others, unchanged: curl as the README has it, schemathesis on our description."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import Running, running
from tiny import write_tokenizer
from vkengine.tokenizer import Tokenizer

SCHEMATHESIS = shutil.which("schemathesis")
README = Path(__file__).parents[2] / "engine" / "README.md"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    write_tokenizer(tmp_path)
    with running(FakeEngine(per_step=2), Tokenizer(tmp_path)) as server:
        yield server
        assert server.idle()


def curl(*arguments: str) -> str:
    program = shutil.which("curl")
    assert program is not None
    done = subprocess.run(
        [program, "--silent", "--show-error", "--max-time", "20", *arguments],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout


def test_curl_as_in_the_readme(server: Running) -> None:
    (body,) = re.findall(r"curl -N localhost:8000/v1/completions -d '(.*)'", README.read_text())
    text = curl("-N", f"{server.url}/v1/completions", "-d", body)
    events = text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-1]]
    assert choices[-1]["finish_reason"] is not None
    asked = json.loads(body)
    whole = json.loads(
        curl(f"{server.url}/v1/completions", "-d", json.dumps({**asked, "stream": False}))
    )
    assert whole["usage"]["completion_tokens"] <= asked["max_tokens"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_transfer_params", {"do_remote_prefill": True}),  # E12: no state is handed over
        ("logits_processors", ["f"]),  # E50
        ("thinking_token_budget", 5),  # E50
        ("response_format", {"type": "json_object"}),  # E52, E53: there is no grammar
        ("guided_json", {}),
        ("structured_outputs", {"json": {}}),
    ],
)
def test_e12_e50_e52_e53_what_is_not_there_is_refused(
    server: Running, field: str, value: Any
) -> None:
    """Never ignored: a request for it is answered 400 and names it."""
    for path, body in (
        ("/v1/completions", {"prompt": [5]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        reply = server.send("POST", path, {**body, "max_tokens": 2, field: value})
        assert reply.status == 400, (path, reply)
        assert reply.json["error"]["param"].split(".")[0] == field


@pytest.mark.nightly
@pytest.mark.skipif(SCHEMATHESIS is None, reason="schemathesis is not installed")
def test_schemathesis_finds_nothing(server: Running, tmp_path: Path) -> None:
    """Its own cases from our description: only 2xx, 4xx and 503, all of them documented."""
    assert SCHEMATHESIS is not None
    command = [SCHEMATHESIS, "run", f"{server.url}/openapi.json", "--max-examples=100", "--seed=1"]
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    done = subprocess.run(
        [*command, f"--checks={checks}", "--no-color", "--request-timeout=20"],
        check=False, capture_output=True, text=True, cwd=tmp_path, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert len(server.engine.admitted) > 20, "hardly a request reached the engine"
