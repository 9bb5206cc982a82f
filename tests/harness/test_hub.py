"""Upload and pull with the real client against the fake Hub."""

from __future__ import annotations

import hashlib
import io
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import report_runs as runs
import yaml
from huggingface_hub import DatasetCard, EvalResultEntry, HfApi, parse_eval_result_entries

from finalbench import hub
from finalbench.bundle import seal
from finalbench.errors import BundleBroken, EnvironmentMissing, UsageError
from finalbench.hub.dataset import read_index
from finalbench.hub.eval_results import eval_results
from finalbench.report import markdown
from finalbench.report.build import build_page
from finalbench.report.tables import all_tables
from finalbench.testing.fake_hub import FakeHub

pytestmark = pytest.mark.usefixtures("drawn_once")

REPO = "lab/results"
SMALL = (
    "workload.requests=2",
    "measure.blocks=2",
    "axes.seq_len=[512]",
    "axes.draft=[none,mtp3]",
    "axes.sampling=[greedy]",
)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with FakeHub() as started:
        yield started


def client(fake: FakeHub, token: str = "hf_write") -> HfApi:
    return HfApi(endpoint=fake.endpoint, token=token)


@pytest.fixture(scope="module")
def uploads(tmp_path_factory: pytest.TempPathFactory) -> list[hub.Upload]:
    root = tmp_path_factory.mktemp("runs")
    made = []
    for number in range(2):
        path = runs.make_run(
            root,
            runs.scenario(*SMALL),
            run_id=f"20261130T22000{number}Z-vk-tiny-1a2b3c4d",
            host=f"{number}b0c",
        )
        seal(path, now_utc="2026-11-30T22:05:00+00:00")
        made.append(hub.plan_upload(path, REPO, environment={}))
    return made


def apply(upload: hub.Upload, fake: FakeHub, **options: object) -> hub.Applied:
    waits: list[float] = []
    done = hub.apply_upload(upload, api=client(fake), sleep=waits.append, **options)
    assert all(0 <= wait <= 60 for wait in waits)
    return done


def test_a_plan_needs_neither_network_nor_token(
    uploads: list[hub.Upload], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a plan opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    document = uploads[0].document()
    paths = [file["path"] for file in document["files"]]
    assert paths == sorted(paths)
    assert {path.split("/")[0] for path in paths} == {
        "README.md",
        "index.jsonl",
        "data",
        "runs",
        "reports",
    }
    assert [file["path"] for file in document["files"] if file["shared"]] == [
        "README.md",
        "index.jsonl",
    ]


def test_the_dry_run_is_exactly_what_is_sent(uploads: list[hub.Upload], fake: FakeHub) -> None:
    planned = uploads[0].files()
    done = apply(uploads[0], fake)
    held = fake.store.files("dataset", REPO)
    held.pop(".gitattributes")
    assert held == planned
    log = fake.store.log("dataset", REPO)
    assert log[0].oid == done.commit
    assert len(log) == 2  # the initial commit and one for the run


def test_two_writers_at_once_keep_both_rows(uploads: list[hub.Upload], fake: FakeHub) -> None:
    threads = [threading.Thread(target=apply, args=(upload, fake)) for upload in uploads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = fake.store.files("dataset", REPO)
    rows = read_index(files["index.jsonl"].decode())
    assert [row.run for row in rows] == [upload.run_id for upload in uploads]
    for upload in uploads:
        assert upload.run_id in files["README.md"].decode()
        assert f"runs/{upload.run_id}/manifest.json" in files


def test_a_stale_head_reads_the_shared_file_again(uploads: list[hub.Upload], fake: FakeHub) -> None:
    fake.store.create("dataset", REPO)
    fake.store.before_commit = lambda: fake.store.push(
        "dataset", REPO, {"index.jsonl": uploads[1].files()["index.jsonl"]}
    )
    done = apply(uploads[0], fake)
    assert done.attempts == 2
    rows = read_index(fake.store.files("dataset", REPO)["index.jsonl"].decode())
    assert len(rows) == 2
    reads = [path for method, path in fake.store.requests if "resolve" in path]
    assert {path.rsplit("/", 1)[-1] for path in reads} == {"index.jsonl"}


@pytest.mark.parametrize("status", [409, 412, 429, 500, 503])
def test_a_passing_refusal_is_tried_again(
    uploads: list[hub.Upload], fake: FakeHub, status: int
) -> None:
    fake.store.fail("commit", status)
    done = apply(uploads[0], fake)
    assert done.commit
    assert len(fake.store.log("dataset", REPO)) == 2


def test_a_commit_whose_answer_was_lost_is_not_sent_twice(
    uploads: list[hub.Upload], fake: FakeHub
) -> None:
    fake.store.fail("commit", 500, applied=True)
    done = apply(uploads[0], fake)
    assert done.already_there
    assert len(fake.store.log("dataset", REPO)) == 2


def test_a_lasting_failure_is_exit_3_and_leaves_nothing(
    uploads: list[hub.Upload], fake: FakeHub
) -> None:
    fake.store.fail("commit", 412, times=100)
    with pytest.raises(EnvironmentMissing, match="busy") as caught:
        apply(uploads[0], fake)
    assert caught.value.exit_code == 3
    assert len(fake.store.log("dataset", REPO)) == 1


def test_the_same_run_twice_is_one_row(uploads: list[hub.Upload], fake: FakeHub) -> None:
    apply(uploads[0], fake)
    again = apply(uploads[0], fake)
    assert again.already_there and again.attempts == 0
    assert len(fake.store.log("dataset", REPO)) == 2


def test_a_pull_request_leaves_main_alone(uploads: list[hub.Upload], fake: FakeHub) -> None:
    done = apply(uploads[0], fake, create_pr=True)
    assert done.pull_request and "1" in done.pull_request
    assert len(fake.store.log("dataset", REPO)) == 1
    assert "README.md" in fake.store.files("dataset", REPO, "refs/pr/1")


@pytest.mark.parametrize(
    ("token", "words"),
    [("hf_expired", "expired"), ("hf_read", "write access"), ("hf_unknown", "refused the token")],
)
def test_a_bad_token_is_exit_3_and_never_printed(
    uploads: list[hub.Upload], fake: FakeHub, token: str, words: str
) -> None:
    with pytest.raises(EnvironmentMissing) as caught:
        hub.apply_upload(uploads[0], api=client(fake, token), sleep=lambda _: None)
    said = f"{caught.value} {caught.value.hint}"
    assert words in said
    assert token not in said
    assert caught.value.exit_code == 3


def test_offline_is_exit_3(
    uploads: list[hub.Upload], fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from huggingface_hub.utils import close_session

    close_session()  # the client decides when it opens a session
    try:
        with pytest.raises(EnvironmentMissing, match="HF_HUB_OFFLINE"):
            apply(uploads[0], fake)
    finally:
        monkeypatch.undo()
        close_session()


def test_no_server_is_exit_3(uploads: list[hub.Upload]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    api = HfApi(endpoint=f"http://127.0.0.1:{port}", token="hf_write")
    with pytest.raises(EnvironmentMissing, match="cannot be reached"):
        hub.apply_upload(uploads[0], api=api, sleep=lambda _: None)


@pytest.mark.parametrize("name", ["results", "a/b/c", "/x", "lab/"])
def test_a_malformed_name_is_exit_2(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="ORG/NAME"):
        hub.plan_upload(tmp_path, name, environment={})


def test_every_subset_opens_with_pandas_by_its_config_name(
    uploads: list[hub.Upload], fake: FakeHub
) -> None:
    for upload in uploads:
        apply(upload, fake)
    files = fake.store.files("dataset", REPO)
    header = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert [config["config_name"] for config in header["configs"]] == [
        "leaderboard",
        "cells",
        "requests",
    ]
    assert header["configs"][0]["default"] is True
    for config in header["configs"]:
        pattern = re.compile(re.escape(config["data_files"]).replace(r"\*", "[^/]+"))
        tables = [
            pd.read_parquet(io.BytesIO(data))
            for path, data in files.items()
            if pattern.fullmatch(path)
        ]
        assert len(tables) == 2
        table = pd.concat(tables)
        assert set(table["run"]) == {upload.run_id for upload in uploads}
        words = table.filter(regex="status|claim_status").astype(str)
        assert words.apply(lambda column: column.str.contains("unverified")).any(axis=None)
    assert DatasetCard(files["README.md"].decode()).data.license == "apache-2.0"


def test_every_shown_number_carries_its_classes(tmp_path: Path) -> None:
    described = runs.scenario(*SMALL, "serving.weights=random:1", "drafts.mtp3.acceptance=0.8")
    path = runs.make_run(tmp_path, described)
    seal(path)
    upload = hub.plan_upload(path, REPO, environment={})
    for name in ("leaderboard", "cells"):
        table = pd.read_parquet(io.BytesIO(upload.own[f"data/{name}/{path.name}.parquet"]))
        shown = table[table["shown"] != "–"]
        assert len(shown)
        assert shown["shown"].str.contains("random weights").all()
        assert shown["shown"].str.contains("unverified").all()
    assert "random weights" in upload.row.classes
    assert "synthetic acceptance" in upload.row.classes
    assert any("no .eval_results entry: random weights" in note for note in upload.notes)
    assert not any("eval_results" in path for path in upload.own)


def test_an_eval_results_entry_names_run_conditions_and_status(
    uploads: list[hub.Upload],
) -> None:
    text = uploads[0].own[f"reports/{uploads[0].run_id}/eval_results.yaml"].decode()
    entry = yaml.safe_load(text)[0]
    assert entry["dataset"] == {"id": REPO, "task_id": "vk-tiny"}
    assert entry["value"] > 0
    assert entry["source"]["url"].endswith(REPO)
    assert "unverified" in entry["notes"] and "stock" in entry["notes"]


MODEL = "lab/vk-tiny"
ENTRY = ".eval_results/lab--results--vk-tiny.yaml"


@pytest.fixture(scope="module")
def proposed(uploads: list[hub.Upload], tmp_path_factory: pytest.TempPathFactory) -> hub.Upload:
    root = tmp_path_factory.mktemp("proposed")
    path = runs.make_run(root, runs.scenario(*SMALL))
    seal(path, now_utc="2026-11-30T22:05:00+00:00")
    return hub.plan_upload(path, REPO, environment={}, model_repo=MODEL)


def propose(upload: hub.Upload, fake: FakeHub, token: str = "hf_write") -> hub.Applied:
    assert upload.proposal is not None
    return hub.apply_proposal(upload.proposal, api=client(fake, token), sleep=lambda _: None)


def test_the_entry_goes_to_the_models_repository_as_a_pull_request(
    proposed: hub.Upload, fake: FakeHub
) -> None:
    fake.store.create("model", MODEL)
    before = fake.store.files("model", MODEL)
    done = propose(proposed, fake)
    assert done.pull_request and done.pull_request.endswith(f"/{MODEL}/discussions/1")
    assert fake.store.files("model", MODEL) == before  # main is left alone
    [planned] = proposed.document()["pull_requests"]
    opened = fake.store.log("model", MODEL, "refs/pr/1")[0]
    assert {name: data for name, data in opened.files.items() if name not in before} == {
        ENTRY: proposed.proposal.content if proposed.proposal else b""
    }
    # The dry run said exactly what was sent.
    [file] = planned["files"]
    assert (planned["repo"], planned["repo_type"], file["path"]) == (MODEL, "model", ENTRY)
    assert file["sha256"] == hashlib.sha256(opened.files[ENTRY]).hexdigest()
    assert (planned["message"], planned["description"]) == (opened.message, opened.description)
    [entry] = eval_result_entries_from(opened.files[ENTRY])
    assert entry.dataset_id == REPO and entry.task_id == "vk-tiny"
    assert entry.notes and "unverified" in entry.notes
    assert "unverified" in opened.description


def eval_result_entries_from(content: bytes) -> list[EvalResultEntry]:
    """As the Hub's own client reads such a file."""
    return parse_eval_result_entries(yaml.safe_load(content))


def test_no_entry_is_proposed_twice(proposed: hub.Upload, fake: FakeHub) -> None:
    fake.store.create("model", MODEL)
    first = propose(proposed, fake)
    again = propose(proposed, fake)
    assert again.already_there and again.attempts == 0
    assert again.pull_request and again.pull_request.endswith("/discussions/1")
    assert first.pull_request and len(fake.store.repo("model", MODEL).pull_requests) == 1
    assert proposed.proposal is not None
    fake.store.push("model", MODEL, {ENTRY: proposed.proposal.content})
    fake.store.repo("model", MODEL).pull_requests.clear()
    assert propose(proposed, fake).already_there  # merged


@pytest.mark.parametrize(
    ("status", "applied"), [(409, False), (412, False), (429, False), (500, False), (500, True)]
)
def test_a_stumbling_service_gets_one_pull_request(
    proposed: hub.Upload, fake: FakeHub, status: int, applied: bool
) -> None:
    fake.store.create("model", MODEL)
    fake.store.fail("commit", status, applied=applied)
    assert propose(proposed, fake).pull_request
    assert len(fake.store.repo("model", MODEL).pull_requests) == 1


def test_a_models_repository_is_never_created(proposed: hub.Upload, fake: FakeHub) -> None:
    with pytest.raises(EnvironmentMissing, match=f"{MODEL} does not exist"):
        propose(proposed, fake)
    assert fake.store.repos == {}


@pytest.mark.parametrize("token", ["hf_read", "hf_expired"])
def test_a_proposal_with_a_bad_token_is_exit_3(
    proposed: hub.Upload, fake: FakeHub, token: str
) -> None:
    fake.store.create("model", MODEL)
    with pytest.raises(EnvironmentMissing):
        propose(proposed, fake, token)
    assert fake.store.repo("model", MODEL).pull_requests == []


def test_what_may_not_be_proposed_is_exit_2(tmp_path: Path) -> None:
    path = runs.make_run(tmp_path / "a", runs.scenario(*SMALL, "serving.weights=random:1"))
    seal(path)
    with pytest.raises(UsageError, match="no entry for this run: random weights"):
        hub.plan_upload(path, REPO, environment={}, model_repo=MODEL)
    other = runs.make_run(tmp_path / "b", runs.scenario(*SMALL, "model.source=lab/other-model"))
    seal(other)
    with pytest.raises(UsageError, match="the run measured lab/other-model"):
        hub.plan_upload(other, REPO, environment={}, model_repo=MODEL)
    with pytest.raises(UsageError, match="ORG/NAME"):
        hub.plan_upload(path, REPO, environment={}, model_repo="vk-tiny")


def test_a_lost_answer_opens_no_second_pull_request_of_a_dataset(
    uploads: list[hub.Upload], fake: FakeHub
) -> None:
    fake.store.fail("commit", 500, applied=True)
    done = apply(uploads[0], fake, create_pr=True)
    assert done.already_there and done.pull_request
    assert len(fake.store.repo("dataset", REPO).pull_requests) == 1


def test_a_divergent_run_gets_no_entry(tmp_path: Path) -> None:
    from finalbench.aggregate import analyse

    analysis = analyse(runs.make_run(tmp_path, runs.scenario(*SMALL)))
    head = analysis.headline.model_copy(update={"equality": "divergent"})
    entry, reason = eval_results(analysis.model_copy(update={"headline": head}), REPO, on="")
    assert entry is None and reason == "equality is divergent"


@pytest.mark.slow
def test_pull_verifies_and_gives_one_leaderboard(
    uploads: list[hub.Upload], fake: FakeHub, tmp_path: Path
) -> None:
    for upload in uploads:
        apply(upload, fake)
    found = hub.pull(REPO, tmp_path / "out", api=client(fake))
    assert [item.problem for item in found] == [None, None]
    paths = [Path(item.path) for item in found if item.path]
    page = build_page(paths)
    text = markdown.leaderboard(page, all_tables(page))
    assert all(upload.run_id in text for upload in uploads)
    assert hub.pull(REPO, tmp_path / "out", api=client(fake)) == found


def test_pull_refuses_what_was_edited_and_keeps_the_rest(
    uploads: list[hub.Upload], fake: FakeHub, tmp_path: Path
) -> None:
    for upload in uploads:
        apply(upload, fake)
    name = f"runs/{uploads[0].run_id}/metrics.json"
    edited = fake.store.files("dataset", REPO)[name].replace(
        b'"decode_tok_s": ', b'"decode_tok_s": 9'
    )
    fake.store.push("dataset", REPO, {name: edited})
    bad, good = hub.pull(REPO, tmp_path, api=client(fake))
    assert bad.path is None and "metrics.json" in str(bad.problem)
    assert not (tmp_path / uploads[0].run_id).exists()
    assert good.path and Path(good.path).is_dir()


def test_pull_never_writes_outside_its_folder(
    uploads: list[hub.Upload], fake: FakeHub, tmp_path: Path
) -> None:
    apply(uploads[0], fake)
    evil = {"runs/../../evil/x.txt": b"x", "runs/r/../../../evil.txt": b"x"}
    fake.store.push("dataset", REPO, evil)
    hub.pull(REPO, tmp_path / "out", api=client(fake))
    assert not list(tmp_path.rglob("evil*"))


def test_pull_of_another_run_of_the_same_name_is_refused(
    uploads: list[hub.Upload], fake: FakeHub, tmp_path: Path
) -> None:
    apply(uploads[0], fake)
    path = runs.make_run(tmp_path, runs.scenario(*SMALL), run_id=uploads[0].run_id, speed=2.0)
    seal(path)
    found = hub.pull(REPO, tmp_path, api=client(fake))
    assert found[0].path is None and "another seal" in str(found[0].problem)


def test_a_missing_dataset_is_exit_3(fake: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="does not exist"):
        hub.pull("lab/nothing", tmp_path, api=client(fake))


def test_a_broken_index_stops_the_upload(uploads: list[hub.Upload], fake: FakeHub) -> None:
    fake.store.create("dataset", REPO)
    fake.store.push("dataset", REPO, {"index.jsonl": b'{"run": "x"}\n'})
    with pytest.raises(BundleBroken, match=r"index\.jsonl, line 1"):
        apply(uploads[0], fake)


def test_without_pyarrow_tables_go_as_json_lines_and_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    path = runs.make_run(tmp_path, runs.scenario(*SMALL))
    seal(path)
    upload = hub.plan_upload(path, REPO, environment={})
    assert f"data/cells/{path.name}.jsonl" in upload.own
    assert any("pyarrow" in note for note in upload.notes)
    assert "data/cells/*.jsonl" in upload.files()["README.md"].decode()
