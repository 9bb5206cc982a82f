"""What of a plan is on disk already, and opening a run folder: new, or an unfinished one again.

Rule: the newest run of the same plan that was cut (running, cancelled or failed), on the same host,
with the same packages and the same commit, is continued. A run that ended with failed cells
(partial) is continued only when it is named.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from finalbench.bundle import unseal
from finalbench.errors import BundleBroken, EnvironmentMissing, UsageError
from finalbench.provenance import Provenance
from finalbench.record import (
    Cell,
    Classes,
    Plan,
    PromptRecord,
    RequestRecord,
    Roll,
    Run,
    RunWriter,
    ScoreRecord,
    load_run,
)
from finalbench.scenario import Scenario

CUT = frozenset({"running", "cancelled", "failed"})


@dataclass(frozen=True, slots=True)
class Opened:
    """A run folder held open for writing, with what it held before."""

    writer: RunWriter
    run: Run
    requests: tuple[RequestRecord, ...]
    scores: tuple[ScoreRecord, ...]
    prompts: tuple[PromptRecord, ...]
    resumed: bool


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def find_unfinished(results: Path, plan: Plan, provenance: Provenance) -> Path | None:
    """The run that the rule above continues, or None."""
    for path in sorted(results.glob("*/run.json"), reverse=True):
        try:
            run = load_run(path.parent).run
        except (BundleBroken, UsageError):
            continue
        if run.plan.hash == plan.hash and run.status in CUT and _same_ground(run, provenance):
            return path.parent
    return None


def open_run(
    *,
    scenario: Scenario,
    plan: Plan,
    provenance: Provenance,
    results: Path,
    resume: Path | None,
    command: tuple[str, ...],
) -> Opened:
    """Create a run folder, or continue `resume`. Errors: `UsageError` when it is another plan."""
    if resume is not None:
        return _reopen(resume, plan, provenance, command)
    started = utc_now()
    stamp = started.replace("-", "").replace(":", "")
    path = results / f"{stamp}-{scenario.name}-{plan.hash[:8]}"
    for number in range(2, 100):
        if not path.exists():
            break
        path = results / f"{stamp}-{scenario.name}-{plan.hash[:8]}-{number}"
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise EnvironmentMissing(f"cannot create {path}: {error.strerror}") from error
    synthetic = any(c.draft.acceptance is not None for c in plan.cells)
    run = Run(
        run_id=path.name,
        status="running",
        scenario=scenario,
        plan=plan,
        provenance=provenance,
        rolls=(
            Roll(index=0, started_utc=started, ended_utc=None, status="running", command=command),
        ),
        failures=(),
        bare_loop=None,
        classes=Classes(
            weights="random" if scenario.serving.weights.startswith("random") else "real",
            acceptance="synthetic" if synthetic else "measured",
        ),
    )
    writer = RunWriter(path)
    writer.write_run(run)
    return Opened(writer, run, (), (), (), resumed=False)


def _reopen(path: Path, plan: Plan, provenance: Provenance, command: tuple[str, ...]) -> Opened:
    writer = RunWriter(path)  # before reading: it drops torn tails and takes the lock
    records = load_run(path)
    run = records.run
    if run.plan.hash != plan.hash:
        writer.close()
        raise UsageError(f"{path.name} is a run of another plan; its scenario or options differ")
    if not _same_ground(run, provenance):
        writer.close()
        raise UsageError(
            f"{path.name} was measured on another machine, commit or package set; start a new run"
        )
    rolls = [
        roll if roll.ended_utc else roll.model_copy(update={"status": "cancelled"})
        for roll in run.rolls
    ]
    rolls.append(
        Roll(
            index=len(rolls),
            started_utc=utc_now(),
            ended_utc=None,
            status="running",
            command=command,
        )
    )
    run = run.model_copy(update={"status": "running", "rolls": tuple(rolls)})
    unseal(path)
    writer.write_run(run)
    return Opened(writer, run, records.requests, records.scores, records.prompts, resumed=True)


def _same_ground(run: Run, now: Provenance) -> bool:
    """Same machine, packages, commit and engine command: what may be one measurement."""
    facts = [(p.host, p.packages, p.git_commit, p.environment) for p in (run.provenance, now)]
    return facts[0] == facts[1]


class Ledger:
    """Which requests and scores of the plan are there."""

    def __init__(self, plan: Plan, opened: Opened) -> None:
        self._plan = plan
        self._done: dict[tuple[str, int, int], RequestRecord] = {}
        self._scored = {score.request_id for score in opened.scores}
        for record in opened.requests:
            self.add(record)

    def add(self, record: RequestRecord) -> None:
        if not record.warmup and record.status == "ok":
            self._done[record.cell_id, record.block, record.prompt_index] = record

    def add_score(self, score: ScoreRecord) -> None:
        self._scored.add(score.request_id)

    def missing(self, cell: Cell, block: int) -> list[int]:
        """Prompt indices of a cell that have no good request in a block."""
        return [i for i in range(cell.requests) if (cell.id, block, i) not in self._done]

    def outputs(self, cell: Cell, block: int) -> list[RequestRecord]:
        found = [self._done.get((cell.id, block, i)) for i in range(cell.requests)]
        return [record for record in found if record is not None]

    def unscored(self, block: int) -> list[RequestRecord]:
        """Greedy outputs of a block that wait for the scoring arm."""
        return [
            record
            for cell in self._plan.cells
            if cell.sampling.greedy and cell.draft.acceptance is None
            for record in self.outputs(cell, block)
            if record.request_id not in self._scored and record.token_ids
        ]

    def count(self) -> int:
        return len(self._done)
