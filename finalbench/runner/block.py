"""One block: its servers one after the other, each fresh; warm-up, cells, counters, scoring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal

from finalbench.errors import EnvironmentMissing
from finalbench.record import Block, Cell, Failure, RequestRecord
from finalbench.runner.bringup import Starter, require_drafts
from finalbench.runner.clean import Cleaner
from finalbench.runner.interrupts import Interrupts
from finalbench.runner.progress import Progress
from finalbench.runner.prompts import Phase, PromptStock
from finalbench.runner.scoring import Scorer, scorer_key
from finalbench.runner.state import Ledger, Opened
from finalbench.runner.telemetry import Telemetry
from finalbench.runner.traffic import Attempt, run_requests
from finalbench.runner.turns import BareTurns, Loop
from finalbench.runner.watch import ServerWatch
from finalbench.runtime.ready import ServerFailed
from finalbench.runtime.server import LiveServer, ServerStartFailed

if TYPE_CHECKING:
    from finalbench.runtime.container import ContainerRuntime

_SERVER_ENVIRONMENT_EXIT = 3  # the engine's exit code for a missing or broken checkpoint or device


class BlockRunner:
    """Runs blocks into an opened run folder. `run_state` is what run.json must hold by now."""

    def __init__(
        self,
        opened: Opened,
        ledger: Ledger,
        endpoints: Mapping[str, str],
        environment: Mapping[str, str],
        interrupts: Interrupts,
        progress: Progress,
        containers: ContainerRuntime | None = None,
    ) -> None:
        self.run_state = opened.run
        self._writer, self._ledger, self._progress = opened.writer, ledger, progress
        self._cleaner = Cleaner.of(environment)
        self._interrupts = interrupts
        self._scenario, self._plan = opened.run.scenario, opened.run.plan
        self._roll = opened.run.rolls[-1].index
        self._starter = Starter(opened.run, endpoints, environment, containers)
        self.bare = BareTurns(
            opened.run,
            opened.writer.path,
            environment,
            self._cleaner,
            processes=containers is None and not endpoints,
        )
        self._prompts = PromptStock(
            self._scenario, opened.prompts, self._guarded(self._writer.append_prompt)
        )
        self._telemetry = Telemetry(self._guarded(self._writer.append_telemetry), environment)
        self._watch: ServerWatch | None = None
        self._measured_arms = {r.arm for r in opened.requests if r.status == "ok"}
        self._scorer_key = scorer_key(self._plan, self._scenario.baseline)
        self._started = 0
        self._last_error: str | None = None

    def run(self, block: Block) -> None:
        """Measure what is missing in this block, then score what waits for a score."""
        for order_index, key in enumerate(block.order):
            cells = [self._plan.cell(cell_id) for cell_id in block.cells[key]]
            self._run_cells(block, key, order_index, cells)
        self._score_late(block)

    def unscored(self) -> bool:
        """Whether any greedy output waits for a score that some arm could give."""
        return self._scorer_key is not None and any(
            self._ledger.unscored(block.index) for block in self._plan.blocks
        )

    def stop_servers(self) -> None:
        """End whatever server is up, and record it."""
        if self._watch is None:
            return
        with self._interrupts.shielded():  # ending a server takes seconds and must not be cut
            watch, self._watch = self._watch, None
            self._telemetry.stop()
            self._writer.append_server(watch.close())

    def _run_cells(self, block: Block, key: str, order_index: int, cells: list[Cell]) -> None:
        """Serve a key's cells; after a server's death the rest goes on with a fresh one."""
        waiting = [c for c in cells if self._ledger.missing(c, block.index)]
        scores = key == self._scorer_key
        while waiting:
            server = self._bring_up(block, key, order_index, "measure", waiting)
            if server is None:
                break
            self._progress.phase("prompts of exact length")
            self._prompts.prepare(server, cells)
            while waiting:
                cell = waiting.pop(0)
                trouble = self._run_cell(block, cell, server)
                if trouble is not None:
                    self._fail(cell, block, trouble)
                    self.stop_servers()
                    break
            else:
                with self.bare.loading(block, key, self.run_state.bare_loop) as loop:
                    # The last server of a block scores; an earlier one has nothing to score.
                    if scores and self._rest_done(block, key):
                        self._score(block, server)
                    if loop is not None:
                        self._take_turns(block, loop, server)
                self.stop_servers()

    def _rest_done(self, block: Block, key: str) -> bool:
        return key == block.order[-1] or not any(
            self._ledger.missing(self._plan.cell(cell_id), block.index)
            for other in block.order[block.order.index(key) + 1 :]
            for cell_id in block.cells[other]
        )

    def _take_turns(self, block: Block, loop: Loop, server: LiveServer) -> None:
        """The bare loop and the server it is compared with, both done with what is measured."""
        cell, watch = self.bare.cell, self._watch
        if cell is None or watch is None:
            return
        self._progress.phase(f"block {block.index + 1}: bare generate loop and {cell.arm} in turns")
        watch.measured()
        taken = self.bare.take(
            loop,
            server,
            self._attempt(block, cell, "measure"),
            self._prompts.warmups(cell),
            self._prompts.measured(cell, list(range(cell.requests))),
        )
        known = self.bare.with_block(self.run_state.bare_loop, taken)
        self.run_state = self.run_state.model_copy(update={"bare_loop": known})
        self._guarded(self._writer.write_run)(self.run_state)

    def _attempt(self, block: Block, cell: Cell, phase: Phase) -> Attempt:
        return Attempt(
            cell=cell,
            block=block.index,
            roll=self._roll,
            server_id=self._server_id(),
            warmup=phase != "measure",
            workload=self._scenario.workload,
            primes=phase == "prime",
        )

    def _run_cell(self, block: Block, cell: Cell, server: LiveServer) -> str | None:
        """Warm up, then measure. Returns why the server is of no more use, or None."""
        missing = self._ledger.missing(cell, block.index)
        self._interrupts.check()
        self._telemetry.read()
        self._progress.phase(f"block {block.index + 1} of {len(self._plan.blocks)}: {cell.label}")
        watch = self._watch
        if watch is not None:
            watch.empty_cache()
        for phase, prompts in self._prompts.phases(cell, missing):
            attempt = self._attempt(block, cell, phase)
            own = cell.id if phase == "measure" else None
            with watch.counting(own) if watch else nullcontext():
                trouble = run_requests(
                    server,
                    attempt,
                    prompts,
                    timeout_s=self._scenario.measure.request_timeout_s,
                    interrupts=self._interrupts,
                    on_record=self._on_record,
                )
            if trouble is not None:
                return trouble
        self._telemetry.read()
        left = self._ledger.missing(cell, block.index)
        if left:
            self._fail(cell, block, self._request_error(cell, block, len(left)))
        return None

    def _on_record(self, record: RequestRecord) -> None:
        if record.error is not None:
            record = record.model_copy(update={"error": self._cleaner.text(record.error)})
        self._guarded(self._writer.append_request)(record)
        self._ledger.add(record)
        if record.status == "ok":
            self._measured_arms.add(record.arm)
        else:
            self._last_error = record.error
        if not record.warmup:
            self._progress.request(record)

    def _request_error(self, cell: Cell, block: Block, left: int) -> str:
        return f"{left} of {cell.requests} requests failed; the last: {self._last_error}"

    def _bring_up(
        self,
        block: Block,
        key: str,
        order_index: int,
        purpose: Literal["measure", "score"],
        waiting: list[Cell],
    ) -> LiveServer | None:
        """A ready server, or None after its cells were marked failed."""
        name = next(c.arm for c in self._plan.cells if c.server_key == key)
        settings = self._plan.servers[key]
        self._started += 1
        server_id = f"{key}-b{block.index}-r{self._roll}-{self._started}"
        self._progress.phase(
            f"block {block.index + 1} of {len(self._plan.blocks)}: starting {name}"
        )
        log = self._writer.path / "logs" / f"{server_id}.log"
        watch = ServerWatch(
            server_id=server_id,
            server_key=key,
            arm=name,
            block=block.index,
            roll=self._roll,
            order_index=order_index,
            purpose=purpose,
            cleaner=self._cleaner,
        )
        try:
            server = self._starter.start(name, settings, log)
        except ServerStartFailed as error:
            self._writer.append_server(watch.failed(error, log))
            if error.exit_code_of_server == _SERVER_ENVIRONMENT_EXIT and (
                name not in self._measured_arms
            ):
                raise EnvironmentMissing(f"{name}: {error.last_line}") from error
            reason = f"the server did not start: {error}"
            for cell in waiting:
                self._note_failure(self._failure(cell, block, reason))
            self._progress.note(f"{name}, block {block.index + 1}, {len(waiting)} cells: {reason}")
            waiting.clear()
            return None
        self._watch = watch
        watch.began(server)
        self._telemetry.watch(server.settings)
        require_drafts(name, server, self._plan)
        self._interrupts.check()
        return server

    def _score_late(self, block: Block) -> None:
        """Score in a server of its own what no measuring server could score."""
        key = self._scorer_key
        if key is None or not self._ledger.unscored(block.index):
            return
        server = self._bring_up(block, key, len(block.order), "score", [])
        if server is not None:
            self._score(block, server)
            self.stop_servers()

    def _score(self, block: Block, server: LiveServer) -> None:
        self._progress.phase(f"block {block.index + 1}: scoring outputs")
        name = next(c.arm for c in self._plan.cells if c.server_key == self._scorer_key)
        scorer = Scorer(
            server, self._server_id(), name, timeout_s=self._scenario.measure.request_timeout_s
        )
        try:
            for request in self._ledger.unscored(block.index):
                self._interrupts.check()
                prompt = self._prompts.by_digest(request.prompt_digest)
                score = scorer.score(request, prompt.token_ids)
                self._guarded(self._writer.append_score)(score)
                self._ledger.add_score(score)
        except ServerFailed as error:
            reason = server.died() or str(error)
            self._note_failure(
                Failure(cell_id=None, block=block.index, roll=self._roll, reason=reason)
            )
        finally:
            scorer.close()

    def _server_id(self) -> str:
        return self._watch.server_id if self._watch else ""

    def _fail(self, cell: Cell, block: Block, reason: str) -> None:
        self._note_failure(self._failure(cell, block, reason))
        self._progress.note(f"{cell.label}, block {block.index + 1}: {reason}")

    def _failure(self, cell: Cell, block: Block, reason: str) -> Failure:
        told = self._cleaner.text(reason) or ""
        return Failure(cell_id=cell.id, block=block.index, roll=self._roll, reason=told)

    def _note_failure(self, failure: Failure) -> None:
        failures = (*self.run_state.failures, failure)
        self.run_state = self.run_state.model_copy(update={"failures": failures})
        self._guarded(self._writer.write_run)(self.run_state)

    def _guarded(self, write: Callable[..., None]) -> Callable[..., None]:
        """A write that no signal cuts in half."""

        def guarded(record: object) -> None:
            with self._interrupts.shielded():
                write(record)

        return guarded
