"""The run folder: nothing half-written survives, nothing whole is lost, damage is named."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import minimal_run

from finalbench.errors import BundleBroken, EnvironmentMissing, UsageError
from finalbench.record import RequestRecord, RunWriter, ScoreRecord, Usage, load_run, write_atomic
from finalbench.record.journal import REQUESTS_FILE, RUN_FILE


def request(index: int) -> RequestRecord:
    return RequestRecord(
        request_id=f"cell-b0-r0-q{index}",
        cell_id="cell",
        block=0,
        roll=0,
        server_id="s",
        arm="vk",
        warmup=False,
        prompt_index=index,
        prompt_digest="d",
        prompt_tokens=4,
        prompt_token_ids=None,
        domain=None,
        seed=1,
        scheduled_ns=0,
        sent_ns=1,
        connect_ns=None,
        chunks=((2, 1), (3, 2)),
        done_ns=4,
        token_ids=(7, 8, 9),
        first_chunk_tokens=1,
        text="x" * 100,
        usage=Usage(prompt=4, completion=3),
        token_source="ids",
        finish_reason="length",
        stop_reason=None,
        done_seen=True,
        http_status=200,
        spec=None,
        status="ok",
        error=None,
    )


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return minimal_run(tmp_path / "run")


def test_records_come_back_as_they_were_written(run_folder: Path) -> None:
    records = [request(i) for i in range(3)]
    score = ScoreRecord(
        request_id="cell-b0-r0-q0",
        cell_id="cell",
        block=0,
        arm="vk",
        scorer_arm="stock",
        scorer_server_id="s",
        unit="logit",
        positions=(),
    )
    writer = RunWriter(run_folder)
    for record in records:
        writer.append_request(record)
    writer.append_score(score)
    writer.close()
    loaded = load_run(run_folder)
    assert list(loaded.requests) == records
    assert loaded.scores == (score,)
    assert loaded.torn == ()


def test_every_cut_of_the_journal_keeps_the_whole_frames(run_folder: Path) -> None:
    path = run_folder / REQUESTS_FILE
    writer = RunWriter(run_folder)
    sizes = []
    for i in range(3):
        writer.append_request(request(i))
        sizes.append(path.stat().st_size)
    writer.close()
    data = path.read_bytes()
    for cut in range(sizes[1], len(data), 7):
        path.write_bytes(data[:cut])
        loaded = load_run(run_folder)
        assert len(loaded.requests) == 2
        assert loaded.torn == ((REQUESTS_FILE,) if cut > sizes[1] else ())


def test_a_torn_tail_is_cut_before_more_is_appended(run_folder: Path) -> None:
    path = run_folder / REQUESTS_FILE
    writer = RunWriter(run_folder)
    for i in range(2):
        writer.append_request(request(i))
    writer.close()
    path.write_bytes(path.read_bytes()[:-5])
    writer = RunWriter(run_folder)
    writer.append_request(request(2))
    writer.close()
    assert [r.prompt_index for r in load_run(run_folder).requests] == [0, 2]


def test_damage_in_the_middle_is_not_a_torn_tail(run_folder: Path) -> None:
    path = run_folder / REQUESTS_FILE
    writer = RunWriter(run_folder)
    for i in range(3):
        writer.append_request(request(i))
    writer.close()
    data = bytearray(path.read_bytes())
    data[0] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(BundleBroken, match=r"requests\.jsonl\.zst: byte 0"):
        load_run(run_folder)


def test_a_wrong_field_is_named_with_file_and_line(run_folder: Path) -> None:
    (run_folder / "servers.jsonl").write_text('{"schema_version": 1}\n')
    with pytest.raises(BundleBroken, match=r"servers\.jsonl, line 1: server_id"):
        load_run(run_folder)


def test_not_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run folder"):
        load_run(tmp_path)


def test_two_writers_are_refused(run_folder: Path) -> None:
    writer = RunWriter(run_folder)
    try:
        with pytest.raises(UsageError, match="another process is writing"):
            RunWriter(run_folder)
    finally:
        writer.close()
    RunWriter(run_folder).close()


def test_atomic_write_keeps_the_old_file_when_the_new_one_fails(tmp_path: Path) -> None:
    path = tmp_path / RUN_FILE
    write_atomic(path, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(EnvironmentMissing, match="the disk is full"):
            write_atomic(path, b"x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == [RUN_FILE]


def test_a_full_disk_leaves_whole_frames(run_folder: Path) -> None:
    writer = RunWriter(run_folder)
    writer.append_request(request(0))
    kept = (run_folder / REQUESTS_FILE).stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kept + 20, limits[1]))
    try:
        with pytest.raises(EnvironmentMissing) as caught:
            writer.append_request(request(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.exit_code == 3
    assert "resume" in str(caught.value.hint)
    writer.append_request(request(2))
    writer.close()
    assert [r.prompt_index for r in load_run(run_folder).requests] == [0, 2]


def test_a_killed_writer_leaves_a_readable_run(run_folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from finalbench.record import RunWriter\n"
        "from test_record import request\n"
        "w = RunWriter(Path(sys.argv[1])); print('up', flush=True)\n"
        "i = 0\n"
        "while True:\n"
        "    w.append_request(request(i)); i += 1\n"
    )
    here = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run_folder)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(here)},
    )
    assert process.stdout is not None
    process.stdout.readline()
    while not (run_folder / REQUESTS_FILE).exists():
        assert process.poll() is None
    process.kill()
    process.wait()
    process.stdout.close()
    indices = [r.prompt_index for r in load_run(run_folder).requests]
    assert indices == list(range(len(indices)))
