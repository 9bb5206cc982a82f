"""Seal a finished run, and tell whether a sealed one is still what it was.

A seal is a manifest with the sha256 of every file and one root hash over it; a signature by an
Ed25519 key may be added. Verification trusts nothing stored: it hashes every byte and derives
every number again from the raw records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from finalbench.bundle.derived import METRICS_FILE, derive, metrics_differences, write_metrics
from finalbench.bundle.signature import SIGNATURE_FILE, check_signature, sign
from finalbench.errors import BundleBroken, UsageError
from finalbench.record import Run, load_run, write_atomic
from finalbench.record.journal import RUN_FILE
from finalbench.scenario import Frozen

MANIFEST_FILE = "manifest.json"
UNSEALED = frozenset({MANIFEST_FILE, SIGNATURE_FILE})
CHUNK_BYTES = 1 << 20

NOT_PROVEN = (
    "that the machine was what it says: hardware, driver and host are reported by the harness",
    "that the run took place at the stated time, or at all: whoever holds the files can make "
    "records up and seal them",
    "who made it: only a signature says that, and only to readers who know the key",
    "that it was the only attempt: rolls are disclosed by the one who ran them",
    "that the weights are the published ones: the digest names what was served, the reader must "
    "compare it",
    "that anybody else would find the same: only a bundle from another host can show that",
)


class FileEntry(Frozen):
    sha256: str
    bytes: int


class Manifest(Frozen):
    """`root` is the sha256 of the canonical JSON of all other fields."""

    schema_version: Literal[1] = 1
    run_id: str
    sealed_utc: str
    files: dict[str, FileEntry]
    root: str


class Problem(Frozen):
    """`field` is known when the file can still be read and a value in it is wrong."""

    file: str
    field: str | None
    message: str


class Verification(Frozen):
    """`signed_by` is the hex of the public key of a valid signature."""

    run_id: str | None
    root: str | None
    problems: tuple[Problem, ...]
    files: int
    bytes: int
    signed_by: str | None
    not_proven: tuple[str, ...] = NOT_PROVEN

    @property
    def ok(self) -> bool:
        return not self.problems

    def require(self) -> None:
        """Raise BundleBroken with the first problem."""
        if self.problems:
            first = self.problems[0]
            where = f"{first.file}: {first.field}" if first.field else first.file
            raise BundleBroken(f"{where}: {first.message}")


def seal(run_dir: Path, *, now_utc: str | None = None) -> Manifest:
    """Write metrics.json and manifest.json. The run must have ended; UsageError otherwise."""
    run = _run(run_dir)
    if run.status == "running":
        raise UsageError(f"{run_dir} is still running; only an ended run can be sealed")
    unseal(run_dir)
    write_metrics(run_dir)
    body = {
        "schema_version": 1,
        "run_id": run.run_id,
        "sealed_utc": now_utc or datetime.now(UTC).isoformat(timespec="seconds"),
        "files": {name: _entry(run_dir / name) for name in _files(run_dir)},
    }
    manifest = Manifest.model_validate({**body, "root": _root(body)})
    write_atomic(run_dir / MANIFEST_FILE, _canonical_file(manifest.model_dump(mode="json")))
    return manifest


def unseal(run_dir: Path) -> None:
    """Remove what a seal adds, before a run is resumed; raw records stay."""
    for name in (*UNSEALED, METRICS_FILE):
        (run_dir / name).unlink(missing_ok=True)


def read_manifest(run_dir: Path) -> Manifest:
    """The manifest, if it is whole. BundleBroken when absent, malformed or not its own root."""
    path = run_dir / MANIFEST_FILE
    if not path.is_file():
        raise BundleBroken(f"{run_dir} is not sealed: it has no {MANIFEST_FILE}")
    data = path.read_bytes()
    try:
        manifest = Manifest.model_validate_json(data)
    except ValueError as error:
        raise BundleBroken(f"{path}: {error}") from error
    document = manifest.model_dump(mode="json")
    body = {name: value for name, value in document.items() if name != "root"}
    if _root(body) != manifest.root:
        raise BundleBroken(f"{path}: root: does not belong to the rest of the manifest")
    if data != _canonical_file(document):
        raise BundleBroken(f"{path}: bytes differ from the form in which seals are written")
    return manifest


def verify(
    run_dir: Path,
    *,
    recompute: bool = True,
    signed_by: str | None = None,
    found: Callable[[Problem], None] = lambda _: None,
) -> Verification:
    """Hash every file, then derive every number again. Broken hashes end the check early.

    `signed_by`: hex of the public key that must have signed the seal. `found` is called with each
    problem at once: a broken hash is known in a second, which field it is in may take many.
    """
    try:
        manifest = read_manifest(run_dir)
    except BundleBroken as error:
        problem = Problem(file=MANIFEST_FILE, field=None, message=str(error))
        found(problem)
        return Verification(
            run_id=None, root=None, problems=(problem,), files=0, bytes=0, signed_by=None
        )
    problems: list[Problem] = []

    def note(problem: Problem) -> None:
        problems.append(problem)
        found(problem)

    for problem in _hash_problems(run_dir, manifest):
        note(problem)
    if recompute and [p.file for p in problems] in ([], [METRICS_FILE]):
        for problem in _recomputed(run_dir):
            note(problem)
    signer, fault = check_signature(run_dir, manifest.root)
    if fault is None and signed_by is not None and signer != signed_by:
        fault = f"signed by {signer}, not by {signed_by}" if signer else "there is no signature"
    if fault is not None:
        note(Problem(file=SIGNATURE_FILE, field=None, message=fault))
    return Verification(
        run_id=manifest.run_id,
        root=manifest.root,
        problems=tuple(problems),
        files=len(manifest.files),
        bytes=sum(entry.bytes for entry in manifest.files.values()),
        signed_by=signer,
    )


def sign_sealed(run_dir: Path, key_path: Path) -> str:
    """Sign a seal that holds, an older signature aside; returns the public key in hex.

    BundleBroken when the seal does not hold; nothing is signed then.
    """
    found = verify(run_dir)
    held = [p for p in found.problems if p.file != SIGNATURE_FILE]
    found.model_copy(update={"problems": tuple(held)}).require()
    return sign(run_dir, str(found.root), key_path)


def _run(run_dir: Path) -> Run:
    path = run_dir / RUN_FILE
    if not path.is_file():
        raise UsageError(f"{run_dir} is not a run folder: it has no {RUN_FILE}")
    try:
        return Run.model_validate_json(path.read_bytes())
    except ValueError as error:
        raise BundleBroken(f"{path}: {error}") from error


def _hash_problems(run_dir: Path, manifest: Manifest) -> Iterator[Problem]:
    present = set(_files(run_dir))
    for name, entry in manifest.files.items():
        if name not in present:
            yield Problem(file=name, field=None, message="is missing")
            continue
        size = (run_dir / name).stat().st_size
        if size != entry.bytes:
            yield Problem(
                file=name, field=None, message=f"has {size} bytes, {entry.bytes} were sealed"
            )
        elif _sha256(run_dir / name) != entry.sha256:
            yield Problem(file=name, field=None, message="its sha256 is not the sealed one")
    for name in sorted(present - set(manifest.files)):
        yield Problem(file=name, field=None, message="was added after the seal")


def _recomputed(run_dir: Path) -> Iterator[Problem]:
    try:
        derived = derive(load_run(run_dir))
    except BundleBroken as error:
        yield Problem(file="records", field=None, message=str(error))
        return
    for difference in metrics_differences(run_dir, derived):
        field, _, rest = difference.partition(" ")
        yield Problem(file=METRICS_FILE, field=field, message=rest)


def _files(run_dir: Path) -> list[str]:
    """Every file of the run by its path inside it; a link could point outside, so none counts."""
    found = []
    for path in sorted(run_dir.rglob("*")):
        if path.is_symlink():
            raise BundleBroken(f"{path} is a link; a bundle holds files only")
        if path.is_file():
            found.append(path.relative_to(run_dir).as_posix())
    return [name for name in found if name not in UNSEALED and name != ".lock"]


def _entry(path: Path) -> dict[str, Any]:
    return {"sha256": _sha256(path), "bytes": path.stat().st_size}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _root(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical_file(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"
