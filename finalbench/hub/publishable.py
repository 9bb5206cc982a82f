"""A run folder -> the files of it that may be published: secrets removed, sealed again, searched.

A folder without secrets goes out as it is, seal and signature included. Where something had to be
removed, a copy is sealed anew, its old root hash is named, and the signature is left behind.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zstandard

from finalbench.bundle import MANIFEST_FILE, SIGNATURE_FILE, read_manifest, seal, verify
from finalbench.errors import BundleBroken
from finalbench.hub.redact import find_secrets, scrub, scrub_document, secret_values

_SKIPPED = {".lock", MANIFEST_FILE, SIGNATURE_FILE}
_ZSTD_LEVEL = 3


@dataclass(frozen=True, slots=True)
class Publishable:
    """`folder` holds a sealed run free of secrets; `removed_from` names the files that were cut."""

    folder: Path
    root: str
    original_root: str
    removed_from: tuple[str, ...]


def publishable(run_dir: Path, scratch: Path, environment: Mapping[str, str]) -> Publishable:
    """Errors: `BundleBroken` when the seal does not hold, or a secret is still found at the end."""
    verify(run_dir).require()
    manifest = read_manifest(run_dir)
    values = secret_values(environment)
    changed = {
        name: cleaned
        for name in manifest.files
        if (cleaned := _cleaned(run_dir / name, values)) is not None
    }
    if not changed:
        done = Publishable(run_dir, manifest.root, manifest.root, ())
    else:
        copy = scratch / run_dir.name
        for name in manifest.files:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            if name in changed:
                (copy / name).write_bytes(changed[name])
            else:
                shutil.copyfile(run_dir / name, copy / name)
        sealed = seal(copy, now_utc=manifest.sealed_utc)
        done = Publishable(copy, sealed.root, manifest.root, tuple(sorted(changed)))
    refuse_secrets({p.name: p.read_bytes() for p in _files(done.folder)}, values)
    return done


def refuse_secrets(files: Mapping[str, bytes], values: tuple[str, ...] = ()) -> None:
    """The last search. Errors: `BundleBroken` naming file, line and kind, never the secret."""
    for name, content in sorted(files.items()):
        for line, kind in find_secrets(readable(name, content), values):
            raise BundleBroken(
                f"{name}, line {line}: looks like a secret ({kind}); nothing was uploaded",
                hint="remove it from the run's files, seal again, and change the secret",
            )


def readable(name: str, content: bytes) -> str:
    """A file as text, unpacked; bytes that are no text are shown as escapes."""
    if name.endswith(".zst"):
        content = b"".join(_frames(content))
    return content.decode("utf-8", errors="backslashreplace")


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]


def _cleaned(path: Path, values: tuple[str, ...]) -> bytes | None:
    """The file's new content, or None where nothing had to be removed."""
    content = path.read_bytes()
    if path.name == "metrics.json" or path.suffix == ".parquet":
        return None  # derived: sealing writes it again
    if path.suffix == ".zst":
        lines = list(_frames(content))
        cleaned = [_clean_line(line, values) for line in lines]
        if cleaned == lines:
            return None
        packer = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        return b"".join(packer.compress(line) for line in cleaned)
    if path.suffix == ".jsonl":
        lines = content.splitlines(keepends=True)
        cleaned = [_clean_line(line, values) for line in lines]
        return b"".join(cleaned) if cleaned != lines else None
    if path.suffix == ".json":
        new = _clean_line(content, values, indent=1)
        return new if new != content else None
    text = content.decode("utf-8", errors="replace")
    new_text = scrub(text, values)
    return new_text.encode() if new_text != text else None


def _clean_line(line: bytes, values: tuple[str, ...], indent: int | None = None) -> bytes:
    document = json.loads(line)
    cleaned = scrub_document(document, values)
    if cleaned == document:
        return line
    separators = (",", ":") if indent is None else None
    text = json.dumps(cleaned, indent=indent, separators=separators, ensure_ascii=False)
    return text.encode() + b"\n"


def _frames(content: bytes) -> list[bytes]:
    frames, start = [], 0
    while start < len(content):
        frame = zstandard.ZstdDecompressor().decompressobj()
        frames.append(frame.decompress(content[start:]))
        start = len(content) - len(frame.unused_data)
    return frames
