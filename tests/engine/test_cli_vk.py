"""`vk` as its users meet it: exit codes, one-line errors, signals, streams over a real socket."""

from __future__ import annotations

import http.client
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny import write_checkpoint
from vkengine.cli import main

Vk = Callable[..., "Result"]

VK = str(Path(sys.executable).parent / "vk")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def vk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Vk:
    """The command in this process: torch is imported once."""

    def call(*arguments: str, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["vk", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert isinstance(code, int)
        return Result(code, *capsys.readouterr())

    return call


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def served(
    folder: Path, profile: str, *options: str
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    command = [VK, "serve", str(folder), "--profile", profile, "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--threads", "1", *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "VK_NONCE": "nonce-7"},
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line == f"vk: serving tiny ({profile}) on http://127.0.0.1:{port}\n"
        yield process, port
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def request(port: int, method: str, path: str, body: object = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, json.dumps(body) if body is not None else None)
    data = connection.getresponse().read()
    connection.close()
    return data


def test_help_is_fast_and_torch_free() -> None:
    began = time.perf_counter()
    result = subprocess.run([VK, "--help"], capture_output=True, text=True, check=True)
    assert time.perf_counter() - began < 2.0  # about 0.15 s on an idle machine
    assert all(name in result.stdout for name in ("serve", "generate", "bench"))
    code = "import vkengine.cli, sys; print([m for m in ('torch', 'uvicorn') if m in sys.modules])"
    probe = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert probe.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve"], "MODEL"),
        (["serve", "x", "--profile", "gpt"], "--profile"),
        (["serve", "x", "--port", "99999"], "--port"),
        (["serve", "x", "--drft", "none"], "--draft"),
        (["serve", "x", "--draft", "mtp"], "mtp:K"),
        (["serve", "x", "--draft", "mtp:9"], "1 to 8"),
        (["bench", "x", "--bare"], "--profile stock"),
        (["bench", "x", "--profile", "stock"], "--bare"),
        (["bench", "x", "--kernels"], "none of"),
        (["generate", "x", "hi", "--top-p", "0"], "top_p"),
        (["fly"], "fly"),
    ],
)
def test_usage_errors_are_2(vk: Vk, arguments: list[str], words: str) -> None:
    result = vk(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_environment_errors_are_3_and_one_line(vk: Vk, folder: Path, tmp_path: Path) -> None:
    bad = Path(shutil.copytree(folder, tmp_path / "bad"))
    (bad / "model.safetensors").write_bytes((bad / "model.safetensors").read_bytes()[:-9])
    cases = [
        (["serve", "nowhere", "--profile", "stock", "--port", "0"], "nowhere"),
        (
            ["serve", str(bad), "--profile", "stock", "--port", "0"],
            "model.safetensors is truncated",
        ),
        (["serve", str(folder), "--profile", "stock", "--device", "cuda", "--port", "0"], "CUDA"),
        (
            ["serve", str(folder), "--profile", "stock", "--api-key-env", "NO_SUCH_KEY"],
            "NO_SUCH_KEY",
        ),
        (["generate", "nowhere", "hi"], "nowhere"),
    ]
    for arguments, words in cases:
        result = vk(*arguments)
        assert (result.returncode, result.stdout) == (3, ""), result.stderr
        assert words in result.stderr
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


def test_a_port_in_use_is_3_before_anything_is_loaded(vk: Vk, folder: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        result = vk("serve", str(folder), "--profile", "stock", "--port", str(port))
        assert result.returncode == 3
        assert result.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}: ")
        assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "number", "code"),
    [
        ("vkae", signal.SIGINT, 130),
        ("vkae", signal.SIGTERM, 0),
        ("stock", signal.SIGINT, 130),
        ("stock", signal.SIGTERM, 0),
    ],
)
def test_a_signal_ends_the_server_in_order(
    folder: Path, profile: str, number: int, code: int
) -> None:
    with served(folder, profile, "--shutdown-timeout-s", "1") as (process, port):
        settings = json.loads(request(port, "GET", "/v1/settings"))
        assert (settings["nonce"], settings["pid"]) == ("nonce-7", process.pid)
        assert (settings["profile"], settings["threads"]) == (profile, 1)
        assert (settings["weights"], settings["dtype"]) == ("real", "float32")
        assert len(settings["model_digest"]) == 64
        body = {"prompt": "The cat", "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
        answer = json.loads(request(port, "POST", "/v1/completions", body))
        assert answer["usage"]["completion_tokens"] == 4
        # One stream is open when the signal comes.
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        body = {**body, "max_tokens": 490, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        response.readline()
        began = time.perf_counter()
        process.send_signal(number)
        tail = response.read()
        assert process.wait(30) == code
        assert time.perf_counter() - began < 20
        assert tail.endswith(b"data: [DONE]\n\n")
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        connection.close()


def test_an_interrupt_while_loading_is_130(folder: Path) -> None:
    command = [VK, "serve", str(folder), "--profile", "stock", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "Traceback" not in process.communicate()[1]


def test_generate(vk: Vk, folder: Path) -> None:
    common = ["--profile", "stock", "--max-tokens", "8", "--threads", "1", "--seed", "4"]
    shown = vk("generate", str(folder), "The cat", *common)
    assert shown.returncode == 0, shown.stderr
    document = json.loads(vk("generate", str(folder), "The cat", *common, "--json").stdout)
    assert document["text"] + "\n" == shown.stdout
    assert (document["schema_version"], document["seed"]) == (1, 4)
    assert 1 <= len(document["token_ids"]) <= 8
    piped = vk("generate", str(folder), "-", *common, stdin="The cat")
    assert piped.stdout == shown.stdout


def test_bare_bench(vk: Vk, folder: Path) -> None:
    sizes = ["--prompt-tokens", "4", "--output-tokens", "5", "--repeat", "1", "--threads", "1"]
    result = vk("bench", str(folder), "--profile", "stock", "--bare", *sizes, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    assert document["decode_tok_s"] == pytest.approx(4 / document["seconds"])
    assert document["threads"] == 1


def test_bare_bench_in_turns(vk: Vk, folder: Path) -> None:
    """Prompts from standard input, each timed as it comes; `generate` gives the same tokens."""
    common = ("bench", str(folder), "--profile", "stock", "--threads", "1", "--stdin")
    sizes = ("--output-tokens", "5", "--json")
    result = vk(*common, "--bare", *sizes, stdin="[5, 6, 7]\n\n[9]\n[5, 6, 7]\n")
    assert result.returncode == 0, result.stderr
    ready, *told = [json.loads(line) for line in result.stdout.splitlines()]
    assert (ready["ready"], ready["profile"], ready["dtype"]) == (True, "stock", "float32")
    assert [document["tokens"] for document in told] == [4, 4, 4]
    assert all(document["seconds"] > 0 and document["threads"] == 1 for document in told)
    assert told[0]["token_ids"] == told[2]["token_ids"] != told[1]["token_ids"]
    assert len(told[0]["token_ids"]) == 5
    for wrong in ("[]", "[1.5]", "[-1]", "[99999]", "5", "tell me"):
        refused = vk(*common, "--bare", *sizes, stdin=wrong)
        assert refused.returncode == 2, wrong
        assert "token id" in refused.stderr and "Traceback" not in refused.stderr
    assert "--bare" in vk("bench", str(folder), "--stdin").stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("qwen35-35b-a3b", "--experts-per-token", "4"), "needs --kernels"),
        (("qwen35-35b-a3b", "--kernels", "--experts-per-token", "9"), "takes 1 to 8 a token"),
        (("qwen36-27b", "--kernels", "--experts-per-token", "1"), "is dense"),
    ],
)
def test_bench_refuses_a_wrong_number_of_experts(
    vk: Vk, arguments: tuple[str, ...], reason: str
) -> None:
    result = vk("bench", *arguments)
    assert result.returncode == 2
    assert reason in " ".join(result.stderr.replace("│", " ").split())


def test_the_readmes_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    readme = Path(__file__).parents[2] / "engine" / "README.md"
    code = readme.read_text("utf-8").split("```python\n")[1].split("```")[0]
    exec(compile(code, str(readme), "exec"), {})
    finished = [line for line in capsys.readouterr().out.splitlines() if "None" not in line]
    assert sorted(line[0] for line in finished) == ["a", "b"]
