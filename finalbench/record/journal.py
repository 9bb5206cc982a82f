"""Writing and reading a run folder: atomic `run.json`, append-only journals, torn tails dropped.

Each line of a `.jsonl.zst` journal is one zstd frame, so a killed process costs at most the frame
it was writing. Nothing here derives a number.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import zstandard
from pydantic import ValidationError

from finalbench.errors import BundleBroken, EnvironmentMissing, UsageError
from finalbench.record.models import (
    PromptRecord,
    RequestRecord,
    Run,
    ScoreRecord,
    ServerRecord,
    TelemetryRecord,
)
from finalbench.record.telemetry import TelemetryBatch, unpacked
from finalbench.scenario import Frozen

RUN_FILE = "run.json"
REQUESTS_FILE = "requests.jsonl.zst"
PROMPTS_FILE = "prompts.jsonl.zst"
SCORES_FILE = "scores.jsonl.zst"
SERVERS_FILE = "servers.jsonl"
TELEMETRY_FILE = "telemetry.jsonl"
LOGS_DIR = "logs"
_LOCK_FILE = ".lock"
_WINDOW_BYTES = 4096
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

M = TypeVar("M", bound=Frozen)
_ALL_FIELDS: dict[type[Frozen], set[str]] = {}


@dataclass(frozen=True, slots=True)
class RunRecords:
    """Everything a run folder holds, parsed. `torn` names journals whose last line was cut."""

    path: Path
    run: Run
    prompts: tuple[PromptRecord, ...]
    requests: tuple[RequestRecord, ...]
    scores: tuple[ScoreRecord, ...]
    servers: tuple[ServerRecord, ...]
    telemetry: tuple[TelemetryRecord, ...]
    torn: tuple[str, ...] = field(default=())


class RunWriter:
    """The only writer of a run folder; it holds a lock on it until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / LOGS_DIR).mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path / _LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UsageError(f"another process is writing {path}") from None
        for name in (PROMPTS_FILE, REQUESTS_FILE, SCORES_FILE):
            _cut_torn_tail(path / name, _whole_frames(path / name))
        for name in (SERVERS_FILE, TELEMETRY_FILE):
            _cut_torn_tail(path / name, _whole_lines(path / name))
        self._compressor = zstandard.ZstdCompressor(level=3)

    def write_run(self, run: Run) -> None:
        """Replace run.json: a reader sees the old or the new one, never half."""
        write_atomic(self.path / RUN_FILE, run.model_dump_json(indent=1).encode() + b"\n")

    def append_prompt(self, record: PromptRecord) -> None:
        self._append_frame(PROMPTS_FILE, record)

    def append_request(self, record: RequestRecord) -> None:
        self._append_frame(REQUESTS_FILE, record)

    def append_score(self, record: ScoreRecord) -> None:
        self._append_frame(SCORES_FILE, record)

    def append_server(self, record: ServerRecord) -> None:
        _append(self.path / SERVERS_FILE, record.model_dump_json().encode() + b"\n")

    def append_telemetry(self, record: TelemetryRecord | TelemetryBatch) -> None:
        _append(self.path / TELEMETRY_FILE, record.model_dump_json().encode() + b"\n")

    def close(self) -> None:
        """Release the lock; the folder is a valid run at any moment, closed or not."""
        (self.path / _LOCK_FILE).unlink(missing_ok=True)
        os.close(self._lock)

    def _append_frame(self, name: str, record: Frozen) -> None:
        line = record.model_dump_json().encode() + b"\n"
        _append(self.path / name, self._compressor.compress(line))


def load_run(path: Path) -> RunRecords:
    """Read a run folder. Errors: `UsageError` when it is none, `BundleBroken` when damaged."""
    if not (path / RUN_FILE).is_file():
        raise UsageError(f"{path} is not a run folder: it has no {RUN_FILE}")
    run = _parse(Run, (path / RUN_FILE).read_bytes(), path / RUN_FILE, 1)
    torn: list[str] = []

    def lines(name: str, *, frames: bool) -> Iterator[tuple[int, bytes]]:
        kept = 0
        whole = (_whole_frames if frames else _whole_lines)(path / name)
        for number, (line, end) in enumerate(whole, start=1):
            yield number, line
            kept = end
        if (path / name).exists() and kept < (path / name).stat().st_size:
            torn.append(name)

    def journal(name: str, model: type[M], *, frames: bool) -> tuple[M, ...]:
        found = lines(name, frames=frames)
        return tuple(_parse(model, line, path / name, number) for number, line in found)

    return RunRecords(
        path=path,
        run=run,
        prompts=journal(PROMPTS_FILE, PromptRecord, frames=True),
        requests=journal(REQUESTS_FILE, RequestRecord, frames=True),
        scores=journal(SCORES_FILE, ScoreRecord, frames=True),
        servers=journal(SERVERS_FILE, ServerRecord, frames=False),
        telemetry=tuple(
            sample
            for number, line in lines(TELEMETRY_FILE, frames=False)
            for sample in _samples(line, path / TELEMETRY_FILE, number)
        ),
        torn=tuple(torn),
    )


def write_atomic(path: Path, data: bytes) -> None:
    """Temporary file, fsync, rename, fsync of the folder."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _disk_error(path, error) from error


def _append(path: Path, data: bytes) -> None:
    """Append all of `data` or nothing of it."""
    try:
        with path.open("ab", buffering=0) as file:
            start = file.tell()
            try:
                written = file.write(data)
                if written != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(start)
                raise
    except OSError as error:
        raise _disk_error(path, error) from error


def _disk_error(path: Path, error: OSError) -> EnvironmentMissing:
    reason = "the disk is full" if error.errno in _FULL else (error.strerror or str(error))
    return EnvironmentMissing(
        f"cannot write {path}: {reason}",
        hint="the run so far is kept; free some space and run the same command again to resume",
    )


def _whole_frames(path: Path) -> Iterator[tuple[bytes, int]]:
    """Lines of the complete frames, each with the offset at which its frame ends."""
    data = memoryview(path.read_bytes() if path.exists() else b"")
    decompressor = zstandard.ZstdDecompressor()
    start = 0
    while start < len(data):
        frame = decompressor.decompressobj()
        parts: list[bytes] = []
        at = start
        # In small windows: what follows a frame is handed back as a copy each time.
        while not frame.eof and at < len(data):
            window = data[at : at + _WINDOW_BYTES]
            try:
                parts.append(frame.decompress(window))
            except zstandard.ZstdError as error:
                raise BundleBroken(f"{path}: byte {start} is not a zstd frame ({error})") from error
            at += len(window)
        if not frame.eof:
            return
        start = at - len(frame.unused_data)
        yield b"".join(parts), start


def _whole_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    end = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        end += len(line)
        if line.endswith(b"\n"):
            yield line, end


def _cut_torn_tail(path: Path, whole: Iterable[tuple[bytes, int]]) -> None:
    kept = max((end for _, end in whole), default=0)
    if path.exists() and path.stat().st_size > kept:
        with path.open("r+b") as file:
            file.truncate(kept)


def _samples(line: bytes, path: Path, number: int) -> Iterable[TelemetryRecord]:
    """A reading of the host, or a batch of samples."""
    if b'"dt_us"' not in line:
        return (_parse(TelemetryRecord, line, path, number),)
    try:
        return tuple(unpacked(_parse(TelemetryBatch, line, path, number)))
    except ValueError as error:
        raise BundleBroken(f"{path}, line {number}: {error}") from None


def _parse(model: type[M], data: bytes, path: Path, line: int) -> M:
    try:
        record = model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BundleBroken(f"{path}, line {line}: {where}: {first['msg']}") from error
    # A record states all its fields; a set of their names for each would cost 2 KB a request.
    object.__setattr__(
        record, "__pydantic_fields_set__", _ALL_FIELDS.setdefault(model, set(model.model_fields))
    )
    return record
