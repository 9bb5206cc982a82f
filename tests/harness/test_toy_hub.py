"""The fake Hub, against the released huggingface_hub client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from finalbench.testing.fake_hub import FakeHub

NAME = "lab/results"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as running:
        yield running


@pytest.fixture
def api(hub: FakeHub) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token="hf_write")


@pytest.fixture
def repo(api: HfApi) -> str:
    api.create_repo(NAME, repo_type="dataset", visibility="private")
    return NAME


def add(path: str, content: bytes) -> CommitOperationAdd:
    return CommitOperationAdd(path_in_repo=path, path_or_fileobj=content)


def commit(api: HfApi, *operations: CommitOperationAdd | CommitOperationDelete, **options: object):
    return api.create_commit(
        NAME, operations, commit_message="results", repo_type="dataset", **options
    )


def test_create_twice_conflicts_unless_it_may_exist(hub: FakeHub, api: HfApi, repo: str) -> None:
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo(NAME, repo_type="dataset")
    api.create_repo(NAME, repo_type="dataset", exist_ok=True)
    assert hub.store.repos[("dataset", NAME)].private


def test_commit_adds_and_deletes(hub: FakeHub, api: HfApi, repo: str) -> None:
    first = commit(api, add("a.txt", b"one"), add("data/b.parquet", b"\x00\xff"))
    assert hub.store.log("dataset", NAME)[0].oid == first.oid
    commit(api, CommitOperationDelete("a.txt"))
    files = hub.store.files("dataset", NAME)
    assert files["data/b.parquet"] == b"\x00\xff"
    assert "a.txt" not in files


def test_upload_folder_download_and_list(
    hub: FakeHub, api: HfApi, repo: str, tmp_path: Path
) -> None:
    source = tmp_path / "out"
    (source / "runs").mkdir(parents=True)
    (source / "runs" / "run.json").write_text("{}")
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Results\n")
    api.upload_folder(repo_id=NAME, folder_path=source, repo_type="dataset")
    assert sorted(api.list_repo_files(NAME, repo_type="dataset")) == [
        ".gitattributes",
        "README.md",
        "runs/run.json",
    ]
    assert any(path == "/api/validate-yaml" for _, path in hub.store.requests)
    got = api.hf_hub_download(
        NAME, "runs/run.json", repo_type="dataset", cache_dir=tmp_path / "cache"
    )
    assert Path(got).read_text() == "{}"
    folder = api.snapshot_download(NAME, repo_type="dataset", cache_dir=tmp_path / "cache")
    assert (Path(folder) / "README.md").read_text().endswith("# Results\n")
    info = api.dataset_info(NAME)
    assert info.sha == hub.store.log("dataset", NAME)[0].oid


def test_pull_request_leaves_main_alone(hub: FakeHub, api: HfApi, repo: str) -> None:
    before = hub.store.files("dataset", NAME)
    done = commit(api, add("x.txt", b"x"), create_pr=True)
    assert done.pr_num == 1
    assert hub.store.files("dataset", NAME) == before
    assert hub.store.files("dataset", NAME, "refs/pr/1")["x.txt"] == b"x"


def test_tags_and_whoami(hub: FakeHub, api: HfApi, repo: str) -> None:
    api.create_tag(NAME, tag="v1", repo_type="dataset")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_tag(NAME, tag="v1", repo_type="dataset")
    assert [tag.name for tag in api.list_repo_refs(NAME, repo_type="dataset").tags] == ["v1"]
    assert api.whoami()["name"] == "tester"


def test_what_is_missing_is_named(api: HfApi, repo: str, tmp_path: Path) -> None:
    with pytest.raises(RepositoryNotFoundError):
        api.dataset_info("lab/nothing")
    with pytest.raises(RemoteEntryNotFoundError):
        api.hf_hub_download(NAME, "no.txt", repo_type="dataset", cache_dir=tmp_path)
    with pytest.raises(RevisionNotFoundError):
        api.hf_hub_download(NAME, "no.txt", repo_type="dataset", revision="v9", cache_dir=tmp_path)


def test_stale_parent_is_refused_and_both_writers_rows_survive(hub: FakeHub, repo: str) -> None:
    """R01: two writers of one shared file."""
    api = HfApi(endpoint=hub.endpoint, token="hf_write")
    head = api.dataset_info(NAME).sha
    hub.store.before_commit = lambda: hub.store.push("dataset", NAME, {"shared.txt": b"theirs\n"})
    with pytest.raises(HfHubHTTPError) as caught:
        commit(api, add("shared.txt", b"ours\n"), parent_commit=head)
    assert caught.value.response.status_code == 412
    theirs = hub.store.files("dataset", NAME)["shared.txt"]
    commit(api, add("shared.txt", theirs + b"ours\n"), parent_commit=api.dataset_info(NAME).sha)
    assert hub.store.files("dataset", NAME)["shared.txt"] == b"theirs\nours\n"


@pytest.mark.parametrize("applied", [False, True])
def test_500_in_mid_commit_with_and_without_effect(
    hub: FakeHub, api: HfApi, repo: str, applied: bool
) -> None:
    hub.store.fail("commit", 500, applied=applied)
    with pytest.raises(HfHubHTTPError) as caught:
        commit(api, add("x.txt", b"x"))
    assert caught.value.response.status_code == 500
    assert ("x.txt" in hub.store.files("dataset", NAME)) == applied
    commit(api, add("y.txt", b"y"))
    assert hub.store.files("dataset", NAME)["y.txt"] == b"y"


def test_too_many_requests_carries_the_limit(hub: FakeHub, api: HfApi, repo: str) -> None:
    hub.store.fail("commit", 429)
    with pytest.raises(HfHubHTTPError, match="Retry after 1 seconds"):
        commit(api, add("x.txt", b"x"))


@pytest.mark.parametrize(
    ("token", "status"), [("hf_expired", 401), ("hf_unknown", 401), ("hf_read", 403)]
)
def test_tokens_that_may_not_write(hub: FakeHub, repo: str, token: str, status: int) -> None:
    api = HfApi(endpoint=hub.endpoint, token=token)
    with pytest.raises(HfHubHTTPError) as caught:
        commit(api, add("x.txt", b"x"))
    assert caught.value.response.status_code == status
    assert "x.txt" not in hub.store.files("dataset", NAME)


def test_a_private_repo_is_hidden_from_strangers(hub: FakeHub, repo: str) -> None:
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.endpoint, token=False).dataset_info(NAME)
    assert HfApi(endpoint=hub.endpoint, token="hf_read").dataset_info(NAME).id == NAME


def test_client_version_is_a_supported_one() -> None:
    assert int(huggingface_hub.__version__.split(".")[0]) in (1, 2)
