"""Case R03: planted secrets never reach an upload; harmless words stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import report_runs as runs
import zstandard

from finalbench.bundle import seal, verify
from finalbench.errors import BundleBroken
from finalbench.hub import find_secrets, plan_upload, scrub, scrub_command, scrub_document
from finalbench.hub.publishable import readable, refuse_secrets
from finalbench.record import PromptRecord, ServerRecord

pytestmark = pytest.mark.usefixtures("drawn_once")

SMALL = (
    "workload.requests=2",
    "measure.blocks=2",
    "axes.seq_len=[512]",
    "axes.draft=[mtp3]",
    "axes.sampling=[greedy]",
)
# Made-up values in the shapes of real ones, put together here so that no scanner trips over them.
BODY = "Zq7" * 14
SECRETS = {
    "hugging face": "hf_" + BODY[:34],
    "openai": "sk-proj-" + BODY[:40],
    "aws": "AKIA" + "QWERTYUIOPASDFGH",
    "google": "AIza" + BODY[:35],
    "github": "ghp_" + BODY[:36],
    "github fine": "github_pat_" + BODY[:30],
    "gitlab": "glpat-" + BODY[:20],
    "slack": "xoxb-" + "1234567890-" + BODY[:12],
    "daytona": "dtn_" + BODY[:30],
    "nvidia": "nvapi-" + BODY[:40],
    "jwt": "eyJhbGciOiJI.eyJzdWIiOiIx." + BODY[:20],
    "bearer": "Authorization: Bearer " + BODY[:24],
    "cookie": "Cookie: session=" + BODY[:24],
    "x-api-key": "x-api-key: " + BODY[:24],
    "json header": '{"X-Api-Key": "' + BODY[:24] + '"}',
    "named": "HF_TOKEN=" + BODY[:24],
    "aws secret": "aws_secret_access_key = " + BODY[:40],
    "url": "http://user:" + BODY[:12] + "@host/path",
    "pem": "-----BEGIN PRIVATE KEY-----\n" + BODY + "\n-----END PRIVATE KEY-----",
}
HARMLESS = (
    "tokenizer=byte-level",
    "token_count: 123456789",
    '"tokenizer": "tokenizer.json"',
    '"token_ids": [12345678, 23456789]',
    '"token_source": "ids_or_usage"',
    '"max_tokens": 64, "min_tokens": 0',
    "passwordless login was used",
    "the secret of speed is bandwidth",
    "model_digest: " + "ab" * 32,
    "http://127.0.0.1:8000/v1/completions",
    "bearer of bad news",
    "a basic understanding of it",
    "--api-key-env MY_VARIABLE_NAME",
)


@pytest.mark.parametrize("name", SECRETS)
def test_every_shape_is_found_and_removed(name: str) -> None:
    text = f"before {SECRETS[name]} after"
    assert list(find_secrets(text))
    cleaned = scrub(text)
    assert not list(find_secrets(cleaned)), cleaned
    assert BODY[:12] not in cleaned
    assert cleaned.startswith("before ") and cleaned.endswith(" after")


def test_one_secret_inside_another_leaves_nothing_of_it() -> None:
    token = SECRETS["hugging face"]
    cleaned = scrub(f"401 for {token}, key={token}!", (token[9:17], token[3:12]))
    assert cleaned == "401 for <removed>, key=<removed>!"
    assert scrub(cleaned) == cleaned


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_words_stay(text: str) -> None:
    assert list(find_secrets(text)) == []
    assert scrub(text) == text


def test_a_command_line_keeps_values_of_known_options_only() -> None:
    command = ["vk", "serve", "vk-tiny", "--port", "41234", "--pin", "hunter22", "--key=hunter22"]
    assert scrub_command(command) == [
        *["vk", "serve", "vk-tiny", "--port", "41234"],
        *["--pin", "<removed>", "--key=<removed>"],
    ]


def test_a_document_is_cleaned_by_name_and_by_shape() -> None:
    document = {
        "environment": {"OMP_NUM_THREADS": "2", "COOKIE": "abc", "AUTHORIZATION": "x"},
        "password": "short",
        "tokenizer": "byte-level",
        "token_count": 17,
        "token": 4711,
        "nested": [{"error": f"401 for {SECRETS['hugging face']}"}],
    }
    assert scrub_document(document) == {
        "environment": {"OMP_NUM_THREADS": "2"},
        "password": "<removed>",
        "tokenizer": "byte-level",
        "token_count": 17,
        "token": 4711,
        "nested": [{"error": "401 for <removed>"}],
    }


def planted(root: Path) -> Path:
    """A sealed run with secrets in all it holds: arguments, settings, log, errors, prompts."""
    path = runs.make_run(root, runs.scenario(*SMALL))
    lines = (path / "servers.jsonl").read_text().splitlines()
    server = ServerRecord.model_validate_json(lines[0])
    command = (*server.command, "--api-key", SECRETS["openai"])
    settings = {**(server.settings or {}), "headers": SECRETS["bearer"]}
    server = server.model_copy(
        update={"command": command, "settings": settings, "settings_after": settings}
    )
    lines[0] = server.model_dump_json()
    (path / "servers.jsonl").write_text("\n".join(lines) + "\n")
    run = json.loads((path / "run.json").read_text())
    run["provenance"]["environment"]["COOKIE"] = BODY[:20]
    run["rolls"][0]["command"] += ["--password", BODY[:20]]
    (path / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    journal = path / "requests.jsonl.zst"
    first, *rest = readable(journal.name, journal.read_bytes()).splitlines(keepends=True)
    request = json.loads(first) | {
        "error": f"401 for {SECRETS['hugging face']}",
        "domain": f"chat {SECRETS['github']}",
    }
    lines = [json.dumps(request) + "\n", *rest]
    pack = zstandard.ZstdCompressor().compress
    journal.write_bytes(b"".join(pack(line.encode()) for line in lines))
    prompt = PromptRecord(
        seq_len=4,
        index=0,
        warmup=True,
        domain=f"code {SECRETS['slack']}",
        digest="ab" * 32,
        token_ids=(1, 2, 3, 4),
    )
    (path / "prompts.jsonl.zst").write_bytes(pack(prompt.model_dump_json().encode() + b"\n"))
    (path / "logs").mkdir(exist_ok=True)
    (path / "logs" / "server.log").write_text(
        f"GET /v1/models\n{SECRETS['cookie']}\nLAB_PASS is in use: {BODY[20:36]}\ntokenizer ok\n"
    )
    seal(path)
    return path


def test_planted_secrets_never_reach_an_upload(tmp_path: Path) -> None:
    path = planted(tmp_path)
    before = {p.name: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    upload = plan_upload(path, "lab/results", environment={"LAB_PASSWORD": BODY[20:36]})
    everything = "\n".join(readable(name, data) for name, data in upload.files().items())
    assert BODY[:12] not in everything
    assert BODY[20:36] not in everything
    assert "1234567890-" not in everything  # of the prompt's domain
    assert "tokenizer ok" in everything
    prompts = f"runs/{upload.run_id}/prompts.jsonl.zst"
    assert '"domain":"code <removed>"' in readable(prompts, upload.own[prompts])
    assert any("sealed anew" in note for note in upload.notes)
    assert {p.name: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before


def test_the_cleaned_copy_still_verifies(tmp_path: Path) -> None:
    upload = plan_upload(planted(tmp_path), "lab/results", environment={})
    prefix = f"runs/{upload.run_id}/"
    target = tmp_path / "copy" / upload.run_id
    for name, data in upload.files().items():
        if name.startswith(prefix):
            file = target / name.removeprefix(prefix)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    assert verify(target).ok


def test_a_run_without_secrets_goes_out_untouched(tmp_path: Path) -> None:
    path = runs.make_run(tmp_path, runs.scenario(*SMALL))
    root = seal(path).root
    upload = plan_upload(path, "lab/results", environment={})
    assert upload.row.root == root
    for name in ("run.json", "requests.jsonl.zst", "manifest.json"):
        assert upload.own[f"runs/{path.name}/{name}"] == (path / name).read_bytes()


def test_the_last_search_blocks_and_never_prints_the_secret() -> None:
    with pytest.raises(BundleBroken, match="line 2") as caught:
        refuse_secrets({"notes.txt": f"fine\n{SECRETS['github']}".encode()})
    assert BODY[:12] not in str(caught.value)


def test_an_unsealed_or_edited_run_is_not_planned(tmp_path: Path) -> None:
    path = runs.make_run(tmp_path, runs.scenario(*SMALL))
    with pytest.raises(BundleBroken, match=r"manifest\.json"):
        plan_upload(path, "lab/results", environment={})
    seal(path)
    (path / "telemetry.jsonl").write_text("")
    with pytest.raises(BundleBroken, match="telemetry"):
        plan_upload(path, "lab/results", environment={})
