"""Seals: any byte or number changed after the seal is found and named."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_records import a_run, make_records, write_run

from finalbench.bundle import (
    MANIFEST_FILE,
    METRICS_FILE,
    NOT_PROVEN,
    SIGNATURE_FILE,
    Derived,
    Problem,
    derive,
    differences,
    load_checked,
    read_manifest,
    seal,
    sign,
    sign_sealed,
    unseal,
    verify,
    write_metrics,
)
from finalbench.errors import BundleBroken, EnvironmentMissing, UsageError
from finalbench.record import RunRecords, load_run

NOW = "2026-11-30T22:10:00+00:00"


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "run", make_records())
    (run / "logs" / "vk.log").write_text("started\n")
    seal(run, now_utc=NOW)
    return run


def named(run: Path) -> list[tuple[str, str | None]]:
    return [(p.file, p.field) for p in verify(run).problems]


def test_a_sealed_run_verifies(sealed: Path) -> None:
    found = verify(sealed)
    assert found.ok
    assert found.problems == ()
    assert found.signed_by is None
    assert found.not_proven == NOT_PROVEN
    manifest = read_manifest(sealed)
    assert found.root == manifest.root
    assert found.run_id == manifest.run_id == "20261130T220000Z-unit-1a2b3c4d"
    assert manifest.sealed_utc == NOW
    assert manifest.schema_version == 1
    assert type(manifest).model_fields["schema_version"].default == 1
    assert set(manifest.files) == {
        "run.json",
        "requests.jsonl.zst",
        "scores.jsonl.zst",
        "servers.jsonl",
        "metrics.json",
        "logs/vk.log",
    }
    assert found.files == 6
    assert found.bytes == sum((sealed / name).stat().st_size for name in manifest.files)
    found.require()


def test_a_seal_bears_its_time(tmp_path: Path) -> None:
    from datetime import UTC, datetime

    sealed_utc = seal(write_run(tmp_path / "run", make_records())).sealed_utc
    age = datetime.now(UTC) - datetime.fromisoformat(sealed_utc)
    assert 0 <= age.total_seconds() < 60


def test_the_same_records_give_the_same_root(tmp_path: Path) -> None:
    roots = {seal(write_run(tmp_path / name, make_records()), now_utc=NOW).root for name in "ab"}
    assert len(roots) == 1
    other = seal(write_run(tmp_path / "c", make_records(seed=1)), now_utc=NOW).root
    assert other not in roots


def test_any_flipped_byte_is_found_and_its_file_named(sealed: Path) -> None:
    draw = random.Random(1)
    for path in sorted(p for p in sealed.rglob("*") if p.is_file()):
        data = path.read_bytes()
        for at in {0, len(data) - 1, *(draw.randrange(len(data)) for _ in range(12))}:
            broken = bytearray(data)
            broken[at] ^= 1 << draw.randrange(8)
            path.write_bytes(bytes(broken))
            name = path.relative_to(sealed).as_posix()
            assert name in {file for file, _ in named(sealed)}, (name, at)
        path.write_bytes(data)
    assert verify(sealed).ok


def test_g4_an_edited_rate_is_named_by_its_field(sealed: Path) -> None:
    document = json.loads((sealed / METRICS_FILE).read_text())
    document["cells"][0]["decode_tok_s"] *= 23.4
    (sealed / METRICS_FILE).write_text(json.dumps(document, indent=1))
    problems = verify(sealed).problems
    assert (METRICS_FILE, "cells[0].decode_tok_s") in [(p.file, p.field) for p in problems]
    with pytest.raises(BundleBroken, match=r"cells\[0\]\.decode_tok_s is .*, the records give"):
        load_checked(sealed)
    with pytest.raises(BundleBroken, match=r"^metrics\.json: (has|its) "):
        verify(sealed).require()
    fields = [p for p in problems if p.field is not None]
    only_fields = verify(sealed).model_copy(update={"problems": tuple(fields)})
    with pytest.raises(BundleBroken, match=r"^metrics\.json: cells\[0\]\.decode_tok_s: is "):
        only_fields.require()


def test_numbers_resealed_by_a_forger_still_disagree_with_the_records(sealed: Path) -> None:
    """Whoever edits metrics.json and writes a fitting manifest is caught by the recomputation."""
    from finalbench.bundle.seal import _canonical_file, _entry, _root

    document = json.loads((sealed / METRICS_FILE).read_text())
    document["cells"][0]["rates"]["decode_tok_s"]["value"] += 1.0
    (sealed / METRICS_FILE).write_text(json.dumps(document, indent=1))
    manifest = json.loads((sealed / MANIFEST_FILE).read_text())
    manifest["files"][METRICS_FILE] = _entry(sealed / METRICS_FILE)
    body = {k: v for k, v in manifest.items() if k != "root"}
    (sealed / MANIFEST_FILE).write_bytes(_canonical_file({**body, "root": _root(body)}))
    assert named(sealed) == [(METRICS_FILE, "cells[0].rates.decode_tok_s.value")]
    assert verify(sealed, recompute=False).ok


def test_missing_and_added_files_are_named(sealed: Path) -> None:
    (sealed / "scores.jsonl.zst").rename(sealed / "other.zst")
    assert named(sealed) == [("scores.jsonl.zst", None), ("other.zst", None)]
    messages = [p.message for p in verify(sealed).problems]
    assert messages == ["is missing", "was added after the seal"]


def test_a_grown_file_is_named_by_its_size(sealed: Path) -> None:
    with (sealed / "servers.jsonl").open("a") as file:
        file.write("\n")
    assert "bytes" in verify(sealed).problems[0].message
    assert named(sealed) == [("servers.jsonl", None)]


def test_an_unsealed_run_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", make_records())
    problems = verify(run).problems
    assert problems[0].file == MANIFEST_FILE
    assert "is not sealed" in problems[0].message
    found = verify(run)
    assert (found.run_id, found.root, found.files, found.bytes) == (None, None, 0, 0)
    assert not found.ok
    with pytest.raises(BundleBroken, match="is not sealed"):
        verify(run).require()


def test_a_running_run_cannot_be_sealed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", make_records(a_run(status="running")))
    with pytest.raises(UsageError, match="still running"):
        seal(run)
    assert not (run / MANIFEST_FILE).exists()


def test_unseal_leaves_the_records(sealed: Path) -> None:
    before = (sealed / "requests.jsonl.zst").read_bytes()
    unseal(sealed)
    assert not (sealed / MANIFEST_FILE).exists()
    assert not (sealed / METRICS_FILE).exists()
    assert (sealed / "requests.jsonl.zst").read_bytes() == before
    records, derived = load_checked(sealed)
    assert derived == derive(records)
    seal(sealed, now_utc=NOW)
    assert verify(sealed).ok


def test_a_manifest_has_one_form(sealed: Path) -> None:
    """The same content written otherwise is not what was sealed."""
    path = sealed / MANIFEST_FILE
    data = path.read_bytes()
    assert data.startswith(b'{\n "files": {\n  "logs/vk.log": {\n')
    assert data.endswith(b"}\n")
    document = json.loads(data)
    for text in (
        json.dumps(document),
        json.dumps(dict(reversed(document.items())), indent=1) + "\n",
        data.decode() + "\n",
    ):
        path.write_text(text)
        assert "bytes differ" in verify(sealed).problems[0].message
    path.write_bytes(data)
    assert verify(sealed).ok


def test_links_are_refused(sealed: Path, tmp_path: Path) -> None:
    (sealed / "logs" / "outside").symlink_to(tmp_path)
    with pytest.raises(BundleBroken, match="is a link"):
        verify(sealed)


def a_key(path: Path) -> Path:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    path.write_bytes(
        Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path


def test_a_signature_names_its_key(sealed: Path, tmp_path: Path) -> None:
    public = sign(sealed, read_manifest(sealed).root, a_key(tmp_path / "key.pem"))
    found = verify(sealed)
    assert found.ok
    assert found.signed_by == public
    document = json.loads((sealed / SIGNATURE_FILE).read_text())
    assert (document["schema_version"], document["algorithm"]) == (1, "ed25519")
    assert (sealed / SIGNATURE_FILE).read_bytes().startswith(b'{\n "algorithm"')
    (sealed / SIGNATURE_FILE).write_text(json.dumps(document))
    assert "bytes differ" in verify(sealed).problems[0].message
    other = sign(sealed, "0" * 64, tmp_path / "key.pem")
    assert other == public
    assert verify(sealed).problems[0].message == "the signature does not belong to this root"
    assert verify(sealed).signed_by is None
    document["public_key"] = "zz"
    (sealed / SIGNATURE_FILE).write_text(json.dumps(document))
    assert verify(sealed).problems[0].message.startswith("not a signature")
    (sealed / SIGNATURE_FILE).write_bytes(b"{}\n")
    assert not verify(sealed).ok


def test_keys_that_do_not_sign(sealed: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    with pytest.raises(EnvironmentMissing, match="cannot read the key"):
        sign(sealed, "0", tmp_path / "none.pem")
    (tmp_path / "text.pem").write_text("hello")
    with pytest.raises(UsageError, match="not an unencrypted PEM"):
        sign(sealed, "0", tmp_path / "text.pem")
    (tmp_path / "x.pem").write_bytes(
        X25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    with pytest.raises(UsageError, match="not an Ed25519 key"):
        sign(sealed, "0", tmp_path / "x.pem")


def test_differences_name_the_leaf() -> None:
    stored = {"a": [1, {"b": 2.0}], "c": None, "d": True}
    assert list(differences(stored, stored)) == []
    assert list(differences(stored, {**stored, "a": [1, {"b": 2.5}]})) == [
        "a[1].b is 2.0, the records give 2.5"
    ]
    assert list(differences({"x": 1}, {"y": 1})) == ["x is not a field", "y is missing"]
    assert list(differences({"x": [1]}, {"x": [1, 2]})) == ["x has 1 entries, the records give 2"]
    assert list(differences({"x": 1}, {"x": True})) == ["x is 1, the records give True"]
    assert list(differences({"x": "1"}, {"x": 1})) == ["x is '1', the records give 1"]
    assert list(differences({"x": {}}, {"x": []})) == ["x is {}, the records give []"]
    assert list(differences({"x": "a"}, {"x": "b"})) == ["x is 'a', the records give 'b'"]
    assert list(differences({"x": None}, {"x": 0})) == ["x is None, the records give 0"]


def test_the_last_place_of_a_float_may_differ_between_machines() -> None:
    assert list(differences(1.0, 1.0 + 1e-12)) == []
    assert list(differences(1.0, 1.0 + 1e-8))
    assert list(differences(0.0, 1e-16)) == []
    assert list(differences(0.0, 1e-9))


@settings(max_examples=30, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)
        ),
    )
)
def test_a_document_never_differs_from_its_own_json(document: object) -> None:
    assert list(differences(json.loads(json.dumps(document)), document)) == []


def test_metrics_json_is_what_the_records_give(sealed: Path) -> None:
    document = json.loads((sealed / METRICS_FILE).read_text())
    assert document["schema_version"] == 1
    assert document == json.loads(json.dumps(derive(load_run(sealed)).document()))
    cell = document["cells"][0]
    for name in (
        "id",
        "model",
        "arm",
        "seq_len",
        "output_len",
        "sampling",
        "draft",
        "concurrency",
        "runtime",
        "decode_tok_s",
        "decode_tok_s_blocks",
    ):
        assert name in cell
    assert set(cell["draft"]) >= {"method", "k", "acceptance"}
    assert write_metrics(sealed).document() == derive(load_run(sealed)).document()


def test_unreadable_metrics_are_named(sealed: Path) -> None:
    (sealed / METRICS_FILE).write_text("{")
    with pytest.raises(BundleBroken, match=r"metrics\.json: not readable"):
        load_checked(sealed)


@pytest.mark.slow
def test_a_flipped_byte_in_100_mb_is_named_in_under_2_seconds(sealed: Path) -> None:
    (sealed / "logs" / "big.log").write_bytes(os.urandom(100_000_000))
    seal(sealed, now_utc=NOW)
    with (sealed / "logs" / "big.log").open("r+b") as file:
        file.seek(73_000_000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))
    start = time.monotonic()
    assert named(sealed) == [("logs/big.log", None)]
    assert time.monotonic() - start < 2.0


def test_a_flipped_metric_is_told_before_anything_is_derived(
    sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash names the file at once; the field follows, after all records were read."""
    data = bytearray((sealed / METRICS_FILE).read_bytes())
    place = data.index(b'"decode_tok_s": ') + len(b'"decode_tok_s": ')
    data[place] ^= 1
    (sealed / METRICS_FILE).write_bytes(data)
    told: list[Problem] = []
    known_before: list[int] = []

    def watched(records: RunRecords) -> Derived:
        known_before.append(len(told))
        return derive(records)

    # The package's function `seal` hides its module of the same name.
    monkeypatch.setattr(sys.modules["finalbench.bundle.seal"], "derive", watched)
    found = verify(sealed, found=told.append)
    assert tuple(told) == found.problems
    assert known_before == [1]
    assert (told[0].file, told[0].field) == (METRICS_FILE, None)
    assert "decode_tok_s" in str(told[1].field)


def test_a_resumed_run_is_no_longer_sealed(tmp_path: Path) -> None:
    """Else its stale metrics.json would be held against the records that are added."""
    from finalbench.runner.state import open_run

    records = make_records(a_run(status="cancelled"))
    run = write_run(tmp_path / "run", records)
    seal(run, now_utc=NOW)
    opened = open_run(
        scenario=records.run.scenario,
        plan=records.run.plan,
        provenance=records.run.provenance,
        results=tmp_path,
        resume=run,
        command=("finalbench", "run"),
    )
    opened.writer.close()
    assert opened.resumed
    assert not (run / MANIFEST_FILE).exists()
    assert not (run / METRICS_FILE).exists()


def test_only_a_seal_that_holds_is_signed(sealed: Path, tmp_path: Path) -> None:
    key = a_key(tmp_path / "key.pem")
    public = sign_sealed(sealed, key)
    assert verify(sealed, signed_by=public).ok
    (problem,) = verify(sealed, signed_by="0" * 64).problems
    assert problem.file == SIGNATURE_FILE
    assert problem.message == f"signed by {public}, not by {'0' * 64}"
    # A broken signature is replaced; a broken record is not signed, and the old signature stays.
    (sealed / SIGNATURE_FILE).write_bytes(b"{}\n")
    assert sign_sealed(sealed, key) == public
    before = (sealed / SIGNATURE_FILE).read_bytes()
    servers = sealed / "servers.jsonl"
    servers.write_bytes(servers.read_bytes() + b" ")
    with pytest.raises(BundleBroken, match=r"servers\.jsonl"):
        sign_sealed(sealed, key)
    assert (sealed / SIGNATURE_FILE).read_bytes() == before


def test_an_unsigned_run_is_nobodys(sealed: Path) -> None:
    (problem,) = verify(sealed, signed_by="ab").problems
    assert problem.message == "there is no signature"


def test_a_wrong_signature_does_not_hide_an_edited_number(sealed: Path) -> None:
    (sealed / SIGNATURE_FILE).write_bytes(b"{}\n")
    metrics = sealed / METRICS_FILE
    metrics.write_text(metrics.read_text().replace('"decode_tok_s": ', '"decode_tok_s": 1', 1))
    found = verify(sealed).problems
    assert {p.file for p in found} == {METRICS_FILE, SIGNATURE_FILE}
    assert any(p.field and "decode_tok_s" in p.field for p in found)
