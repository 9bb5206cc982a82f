"""Whole runs against the toy server: what dies, what is cut, and what goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from finalbench.bundle import derive
from finalbench.errors import EnvironmentMissing, Interrupted, UsageError
from finalbench.record import RequestRecord, load_run
from finalbench.runner import Options, Outcome, Silent, execute
from finalbench.runner.interrupts import Interrupts
from finalbench.runtime.process import OWNER_VARIABLE
from finalbench.scenario import Scenario, load_scenario, parse_override

pytestmark = pytest.mark.slow

FAKE_VK = f"{sys.executable} {Path(__file__).parent / 'fake_vk.py'}"
SMALL = (
    "measure.blocks=1",
    "workload.requests=2",
    "axes.seq_len=[32]",
    "axes.output_len=[8]",
    "axes.sampling=[greedy]",
    "axes.draft=[none,mtp3]",
    "base={seq_len: 32, output_len: 8, sampling: greedy, draft: mtp3}",
    "serving.threads=1",
    "measure.bare_loop=false",
    "measure.client_ceiling=false",
    "measure.start_timeout_s=30.0",
)


def small(*overrides: str) -> Scenario:
    return load_scenario("vk-tiny", [parse_override(text) for text in (*SMALL, *overrides)])


def options(results: Path, behaviours: str = "", **changes: object) -> Options:
    environment = os.environ | {"FINALBENCH_VK": FAKE_VK, "VK_FAKE": behaviours}
    return Options(results=results, environment=environment, **changes)  # ty: ignore[invalid-argument-type]


@pytest.fixture(autouse=True)
def one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one test are made from one commit, whatever happens in the work tree meanwhile."""
    monkeypatch.setattr("finalbench.provenance._git", lambda folder: ("c" * 40, False))


class Watcher(Silent):
    """Notes what it is told, and acts when a request ends."""

    def __init__(self, on_request: Callable[[RequestRecord], None] = lambda record: None) -> None:
        self.phases: list[str] = []
        self.notes: list[str] = []
        self._on_request = on_request

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def request(self, record: RequestRecord) -> None:
        self._on_request(record)


def our_servers(owner: int | None = None) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            value = process.environ().get(OWNER_VARIABLE)
        except psutil.Error:
            continue
        if value == str(owner or os.getpid()):
            found.append(process.pid)
    return found


def test_a_run_records_everything(tmp_path: Path) -> None:
    outcome = execute(
        small("measure.blocks=2", "measure.bare_loop=true", "measure.client_ceiling=true"),
        options(tmp_path, "stock:ok,step_ms=1"),  # one token a chunk, so that there is a rate
        Silent(),
    )
    records = load_run(outcome.path)
    assert outcome.run.status == records.run.status == "complete"
    assert [roll.status for roll in records.run.rolls] == ["complete"]
    plan = records.run.plan
    measured = [r for r in records.requests if not r.warmup]
    warm = [r for r in records.requests if r.warmup]
    assert len(measured) == 2 * sum(c.requests for c in plan.cells) == 12
    assert {r.status for r in records.requests} == {"ok"}
    assert all(len(r.token_ids) == 8 == r.usage.completion for r in measured if r.usage)
    # Warm-up prompts are never measured ones, and every arm gets the same prompts.
    assert not {r.prompt_digest for r in warm} & {r.prompt_digest for r in measured}
    digests = {
        cell.id: tuple(sorted(r.prompt_digest for r in measured if r.cell_id == cell.id))
        for cell in plan.cells
    }
    assert len(set(digests.values())) == 1
    assert {p.digest for p in records.prompts} >= {r.prompt_digest for r in measured}
    assert all(len(p.token_ids) == p.seq_len == 32 for p in records.prompts)
    # Every greedy output is scored, in its own block, by the stock arm.
    scored = {s.request_id: s for s in records.scores}
    assert set(scored) == {r.request_id for r in measured}
    for record in measured:
        score = scored[record.request_id]
        assert [p.token for p in score.positions] == list(record.token_ids)
        assert (score.block, score.scorer_arm, score.unit) == (record.block, "stock", "logit")
    # A fresh process per arm and block; the second block, which ends with vk, gets a scorer.
    measuring = [s for s in records.servers if s.purpose == "measure"]
    assert len({s.pid for s in records.servers}) == len(records.servers) == 5
    assert [s.arm for s in measuring] == ["vk", "stock", "stock", "vk"]
    for server in records.servers:
        assert server.settings is not None and server.settings_after is not None
        assert server.settings["nonce"] == server.settings_after["nonce"] == server.nonce
        assert server.counters_after is not None
        assert server.error is None
        assert (outcome.path / str(server.log)).is_file()
    bare = records.run.bare_loop
    assert bare is not None and bare.decode_tok_s == pytest.approx(100.0)
    assert [block.block for block in bare.blocks] == [0, 1]
    for block in bare.blocks:
        (server,) = [s for s in measuring if s.server_id == block.server_id]
        assert (server.arm, server.block, block.reason) == ("stock", block.block, None)
        first = ["bare", "http"] if block.block == 0 else ["http", "bare"]
        assert [turn.first for turn in block.turns] == first * 2
        assert {(t.bare_tokens, t.bare_seconds, t.http_tokens) for t in block.turns} == {
            (7, 0.07, 7)
        }
        assert all(t.http_seconds > 0 for t in block.turns)
        assert {t.prompt_index for t in block.turns} == {0, 1}
    # What was served in turns belongs to no cell: counters were read before.
    assert not [v for v in derive(records).violations if v.rule == "engine_count"]
    (ceiling,) = records.run.client_ceilings
    assert ceiling.streams == 1 and ceiling.chunks_per_s is not None
    assert records.telemetry
    assert our_servers() == []


def test_a_bare_loop_that_dies_costs_the_run_nothing_else(tmp_path: Path) -> None:
    wanted = small("measure.bare_loop=true", "axes.draft=[none]", "base.draft=none")
    chosen = options(tmp_path, "stock:ok,step_ms=1")
    chosen = replace(chosen, environment={**chosen.environment, "VK_FAKE_BARE": "dies"})
    outcome = execute(wanted, chosen, Silent())
    assert outcome.run.status == "complete"
    assert outcome.run.bare_loop is not None and outcome.run.bare_loop.decode_tok_s is None
    (block,) = outcome.run.bare_loop.blocks
    assert block.turns == ()
    assert block.reason == "the bare loop ended (exit code 1): out of memory"
    assert our_servers() == []


def test_a_warm_up_by_rule_goes_on_until_times_are_steady(tmp_path: Path) -> None:
    """C07, C09: the toy is slow at first and steady later; what was sent is on record."""
    slow = "warming,warm_decay_ms=400,step_ms=1,prefill_ms=1"
    wanted = small("workload.warmup_rounds=12", "axes.draft=[none]", "base.draft=none")
    outcome = execute(wanted, options(tmp_path, f"vk:{slow}"), Silent())
    assert outcome.run.status == "complete"
    records = load_run(outcome.path)
    warm = {
        arm: [r for r in records.requests if r.warmup and r.arm == arm] for arm in ("vk", "stock")
    }
    assert len(warm["vk"]) >= 6 > len(warm["stock"]) >= 3
    assert len({r.prompt_digest for r in warm["vk"]}) == len(warm["vk"])
    assert {r.prompt_tokens for r in warm["vk"]} == {32}
    last = [(r.chunks[0][0] - r.sent_ns) / 1e6 for r in warm["vk"][-3:]]
    assert max(last) < 100 < (warm["vk"][0].chunks[0][0] - warm["vk"][0].sent_ns) / 1e6
    unsteady = [v for v in derive(records).violations if v.rule == "warm_up_unsteady"]
    assert unsteady == []


def test_no_warm_up_means_none(tmp_path: Path) -> None:
    """T18: what was asked for is what the server got."""
    wanted = small("workload.warmup_requests=0", "axes.draft=[none]", "base.draft=none")
    assert wanted.workload.warmup_rounds is not None
    records = load_run(execute(wanted, options(tmp_path), Silent()).path)
    assert not any(r.warmup for r in records.requests)
    assert not any(v.rule == "warm_up_unsteady" for v in derive(records).violations)


OPEN = ("workload.requests=12", "workload.warmup_requests=0", "serving.max_sequences=4")


def open_loop(*overrides: str) -> Scenario:
    return small(
        *OPEN,
        "arms=[vk]",
        "baseline=null",
        "axes.draft=[none]",
        "axes.concurrency=[4]",
        "base={seq_len: 32, output_len: 8, sampling: greedy, draft: none, concurrency: 4}",
        *overrides,
    )


def test_a_constant_rate_is_kept_whatever_the_server_does(tmp_path: Path) -> None:
    """L01: a server slower than its arrivals is late against the schedule, not quicker."""
    wanted = open_loop(
        "workload.arrivals=constant",
        "workload.rate_per_s=40",
        "workload.limits={ttft_s: 0.2, e2e_s: 60.0}",
    )
    slow = "ok,step_ms=25,prefill_ms=25"  # 0.2 s a request: four streams end 20 a second
    outcome = execute(wanted, options(tmp_path, f"vk:{slow}"), Silent())
    records = load_run(outcome.path)
    measured = sorted((r for r in records.requests if not r.warmup), key=lambda r: r.scheduled_ns)
    gaps = [b.scheduled_ns - a.scheduled_ns for a, b in pairwise(measured)]
    assert set(gaps) == {25_000_000}
    assert measured[-1].sent_ns - measured[-1].scheduled_ns > 100_000_000
    (row,) = derive(records).metrics.cells
    assert row.latencies["ttft_scheduled_s"].mean > row.latencies["ttft_s"].mean
    # Goodput: of those scheduled, the ones whose first token came in time by the schedule.
    met = [r for r in measured if r.chunks[0][0] - r.scheduled_ns <= 200_000_000]
    assert 0 < len(met) < len(measured)
    assert row.goodput_share == len(met) / len(measured)


def test_poisson_arrivals_are_the_same_in_every_arm_and_block(tmp_path: Path) -> None:
    wanted = open_loop(
        "arms=[vk, stock]",
        "measure.blocks=2",
        "workload.arrivals=poisson",
        "workload.rate_per_s=200",
    )
    records = load_run(execute(wanted, options(tmp_path), Silent()).path)
    offsets = set()
    for arm in ("vk", "stock"):
        for block in (0, 1):
            times = sorted(
                r.scheduled_ns for r in records.requests if (r.arm, r.block) == (arm, block)
            )
            offsets.add(tuple(t - times[0] for t in times))
    (only,) = offsets
    assert len(only) == 12
    assert len({b - a for a, b in pairwise(only)}) > 6


def test_sampled_outputs_are_not_scored(tmp_path: Path) -> None:
    scenario = small(
        "axes.sampling=[t07]", "base={seq_len: 32, output_len: 8, sampling: t07, draft: mtp3}"
    )
    outcome = execute(scenario, options(tmp_path), Silent())
    assert outcome.run.status == "complete"
    assert load_run(outcome.path).scores == ()


def test_a_server_that_dies_costs_its_cell_and_the_rest_goes_on(tmp_path: Path) -> None:
    killed: list[str] = []

    def kill_once(record: RequestRecord) -> None:
        if not killed and record.arm == "vk":
            killed.append(record.cell_id)
            for pid in our_servers():
                os.kill(pid, signal.SIGKILL)

    watcher = Watcher(kill_once)
    outcome = execute(small(), options(tmp_path), watcher)
    records = load_run(outcome.path)
    assert outcome.run.status == "partial"
    assert [f.cell_id for f in outcome.run.failures] == killed
    assert "killed by SIGKILL" in outcome.run.failures[0].reason
    assert any("killed by SIGKILL" in note for note in watcher.notes)
    good = {r.cell_id for r in records.requests if r.status == "ok" and not r.warmup}
    assert good == {c.id for c in outcome.run.plan.cells}
    vk_servers = [s for s in records.servers if s.arm == "vk"]
    assert len(vk_servers) == 2
    assert vk_servers[0].exit_code == -signal.SIGKILL
    assert our_servers() == []


def test_a_named_partial_run_is_completed_as_a_new_roll(tmp_path: Path) -> None:
    def kill(record: RequestRecord) -> None:
        if record.arm == "vk":
            for pid in our_servers():
                os.kill(pid, signal.SIGKILL)

    first = execute(small(), options(tmp_path), Watcher(kill))
    assert first.run.status == "partial"
    before = load_run(first.path)
    kept = [r for r in before.requests if r.status == "ok"]
    # Without a name a run that ended is left alone.
    second = execute(small(), options(tmp_path), Silent())
    assert second.path != first.path
    third = execute(small(), options(tmp_path, resume=first.path), Silent())
    after = load_run(first.path)
    assert third.resumed and third.run.status == "complete"
    assert [roll.status for roll in after.run.rolls] == ["partial", "complete"]
    assert [roll.failed for roll in after.run.rolls] == [2, 0]
    assert after.run.failures == ()
    assert after.requests[: len(before.requests)] == before.requests
    again = [r for r in after.requests if r.roll == 1 and not r.warmup]
    assert {r.request_id for r in again}.isdisjoint(r.request_id for r in kept)
    assert {r.prompt_digest for r in again} <= {r.prompt_digest for r in kept}


def test_a_server_that_dies_again_and_again_fails_every_cell_and_ends(tmp_path: Path) -> None:
    outcome = execute(small(), options(tmp_path, "vk:dies,die_after=1"), Silent())
    assert outcome.run.status == "partial"
    assert {f.cell_id for f in outcome.run.failures} == {
        c.id for c in outcome.run.plan.cells if c.arm == "vk"
    }
    assert all("exit code 9" in f.reason for f in outcome.run.failures)


def test_failed_requests_are_kept_and_named(tmp_path: Path) -> None:
    outcome = execute(small(), options(tmp_path, "vk:ok,fail_share=1.0"), Silent())
    records = load_run(outcome.path)
    assert outcome.run.status == "partial"
    assert "2 of 2 requests failed; the last: HTTP 500" in outcome.run.failures[0].reason
    failed = [r for r in records.requests if r.status == "failed"]
    assert {r.http_status for r in failed} == {500}


def test_a_stalled_server_is_replaced(tmp_path: Path) -> None:
    outcome = execute(
        small("measure.request_timeout_s=0.5"), options(tmp_path, "vk:stall"), Silent()
    )
    assert {f.cell_id for f in outcome.run.failures} == {
        c.id for c in outcome.run.plan.cells if c.arm == "vk"
    }
    assert "timed out" in outcome.run.failures[0].reason
    stock = {c.id for c in outcome.run.plan.cells if c.arm == "stock"}
    good = {r.cell_id for r in load_run(outcome.path).requests if r.status == "ok"}
    assert stock <= good


def test_a_server_that_cannot_start_fails_its_cells_only(tmp_path: Path) -> None:
    watcher = Watcher()
    outcome = execute(small(), options(tmp_path, "vk:wrong_nonce"), watcher)
    assert outcome.run.status == "partial"
    assert "nonce is not ours" in outcome.run.failures[0].reason
    assert len([note for note in watcher.notes if "nonce" in note]) == 1


def test_an_arm_without_its_environment_stops_the_run(tmp_path: Path) -> None:
    vk = tmp_path / "vk.py"
    vk.write_text("import sys; print('error: no safetensors file'); sys.exit(3)\n")
    environment = os.environ | {"FINALBENCH_VK": f"{sys.executable} {vk}"}
    with pytest.raises(EnvironmentMissing, match="vk: no safetensors file"):
        execute(small(), Options(results=tmp_path, environment=environment), Silent())
    (run,) = tmp_path.glob("*/run.json")
    assert load_run(run.parent).run.status == "failed"


def interrupt_at(phase: str) -> Watcher:
    class AtPhase(Watcher):
        def phase(self, text: str) -> None:
            super().phase(text)
            if phase in text:
                os.kill(os.getpid(), signal.SIGINT)

    return AtPhase()


@pytest.mark.parametrize(
    "phase", ["starting vk", "prompts of exact length", ": vk 32", "starting stock", "scoring"]
)
def test_ctrl_c_in_each_phase_keeps_a_run_that_resumes(tmp_path: Path, phase: str) -> None:
    scenario = small()
    with pytest.raises(Interrupted) as caught:
        execute(scenario, options(tmp_path), interrupt_at(phase))
    assert caught.value.exit_code == 130
    assert our_servers() == []
    (run,) = tmp_path.glob("*/run.json")
    cut = load_run(run.parent)
    assert cut.run.status == "cancelled"
    assert cut.torn == ()
    resumed = execute(scenario, options(tmp_path), Silent())
    assert resumed.path == run.parent
    assert resumed.run.status == "complete"
    assert [roll.status for roll in resumed.run.rolls] == ["cancelled", "complete"]
    measured = [r for r in load_run(run.parent).requests if not r.warmup and r.status == "ok"]
    keys = [(r.cell_id, r.block, r.prompt_index) for r in measured]
    assert len(keys) == len(set(keys)) == 6


def test_ctrl_c_during_a_request_records_it_as_cancelled(tmp_path: Path) -> None:
    def cut(record: RequestRecord) -> None:
        if record.arm == "vk":
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        execute(small(), options(tmp_path, "vk:ok,step_ms=20"), Watcher(cut))
    (run,) = tmp_path.glob("*/run.json")
    statuses = [r.status for r in load_run(run.parent).requests if not r.warmup]
    assert statuses[0] == "ok"
    assert set(statuses[1:]) <= {"cancelled"}


def test_another_plan_or_ground_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        execute(small(), options(tmp_path), interrupt_at("starting vk"))
    (run,) = tmp_path.glob("*/run.json")
    other = small("workload.seed=2")
    with pytest.raises(UsageError, match="a run of another plan"):
        execute(other, options(tmp_path, resume=run.parent), Silent())
    environment: Mapping[str, str] = options(tmp_path).environment | {"OMP_NUM_THREADS": "3"}
    moved = Options(results=tmp_path, environment=environment, resume=run.parent)
    with pytest.raises(UsageError, match="another machine, commit or package set"):
        execute(small(), moved, Silent())
    fresh = execute(small(), options(tmp_path, fresh=True), Silent())
    assert fresh.path != run.parent


def test_resuming_a_complete_run_runs_nothing(tmp_path: Path) -> None:
    first = execute(small(), options(tmp_path), Silent())
    watcher = Watcher()
    again = execute(small(), options(tmp_path, resume=first.path), watcher)
    assert again.run.status == "complete"
    assert not [p for p in watcher.phases if "starting" in p]
    assert load_run(first.path).requests == load_run(first.path).requests


def test_endpoints_are_used_in_place_of_processes(tmp_path: Path) -> None:
    from finalbench.runtime.process import ServerProcess, choose_port
    from finalbench.runtime.ready import wait_ready

    urls, servers = {}, []
    for arm, profile in (("vk", "vkae"), ("stock", "stock")):
        port = choose_port()
        command = [sys.executable, "-m", "finalbench.testing.toy", "--port", str(port)]
        command += ["--profile", profile, "--behaviour", "fast", "--model", "vk-tiny"]
        servers.append(ServerProcess.start(command, tmp_path / f"{arm}.log", os.environ))
        urls[arm] = f"http://127.0.0.1:{port}"
        wait_ready(urls[arm], timeout_s=30, dead=lambda: None)
    try:
        outcome = execute(small(), options(tmp_path, endpoints=urls), Silent())
        assert outcome.run.status == "complete"
        records = load_run(outcome.path)
        assert {s.runtime for s in records.servers} == {"endpoint"}
        assert all(server.exit_code() is None for server in servers)
    finally:
        for server in servers:
            server.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_FSIZE stands for a full disk")
def test_a_full_disk_ends_the_run_with_exit_3_and_it_resumes(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_runner import Silent, execute, options, small\n"
        "from finalbench.errors import EnvironmentMissing\n"
        "import finalbench.provenance\n"
        "finalbench.provenance._git = lambda folder: ('c' * 40, False)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "class Full(Silent):\n"
        "    def request(self, record):\n"
        "        if record.arm == 'vk':\n"
        "            resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    execute(small(), options(Path(sys.argv[1])), Full())\n"
        "except EnvironmentMissing as error:\n"
        "    print(error); sys.exit(error.exit_code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "the disk is full" in done.stdout
    assert "Traceback" not in done.stderr
    (run,) = tmp_path.glob("*/run.json")
    resumed = execute(small(), options(tmp_path), Silent())
    assert resumed.path == run.parent
    assert resumed.run.status == "complete"


def test_a_shielded_signal_is_delivered_afterwards() -> None:
    interrupts = Interrupts()
    done: list[str] = []
    with interrupts.installed(), pytest.raises(KeyboardInterrupt), interrupts.shielded():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        done.append("the write went on")
    assert done == ["the write went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_was_swallowed_is_raised_again() -> None:
    """As Python does with exceptions in fork handlers and finalizers."""
    interrupts = Interrupts()
    with interrupts.installed():
        interrupts.check()
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_outcome_paths_are_unique_within_a_second(tmp_path: Path) -> None:
    paths: list[Outcome] = [
        execute(small(), options(tmp_path, fresh=True), Silent()) for _ in range(2)
    ]
    assert len({outcome.path for outcome in paths}) == 2
