"""The baseline's own loop and its server in turns: what HTTP costs, on the same prompts.

A machine changes its speed from minute to minute by more than a server may cost. So a second
process of the baseline, without a server, is brought up beside the measured one once its cells are
done, and each prompt goes through both, the one right behind the other; who comes first changes
from turn to turn and from block to block. Never both at once: the other one waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finalbench.arms import arm, bare_command
from finalbench.client.http import StreamClient
from finalbench.client.stream import complete
from finalbench.record import BareBlock, BareLoop, BareTurn, Block, Cell, PromptRecord, Run
from finalbench.runner.clean import Cleaner
from finalbench.runner.traffic import Attempt, body_of
from finalbench.runtime.process import ServerProcess, describe_exit, last_lines
from finalbench.runtime.ready import ServerFailed
from finalbench.runtime.server import LiveServer, server_environment, vk_executable

TURNS = 4  # a block; so that each goes first as often as the other
_POLL_S = 0.02


class BareTurns:
    """Turns of a run's blocks; none where the baseline has no loop of its own or no room for it.

    Room is where servers are our own children and on a CPU: a GPU may hold the weights only once.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        environment: Mapping[str, str],
        cleaner: Cleaner,
        *,
        processes: bool,
    ) -> None:
        self._run, self._folder = run, folder
        self._environment, self._cleaner = environment, cleaner
        self._timeout_s = run.scenario.measure.request_timeout_s
        self.cell = _base_cell(run) if processes and run.scenario.measure.bare_loop else None

    @contextlib.contextmanager
    def loading(self, block: Block, key: str, known: BareLoop | None) -> Generator[Loop | None]:
        """The loop's process, which loads while others work; None where this server needs none."""
        done = {found.block for found in known.blocks} if known else set()
        if self.cell is None or self.cell.server_key != key or block.index in done:
            yield None
            return
        log = self._folder / "logs" / f"bare-b{block.index}.log"
        log.unlink(missing_ok=True)
        settings = self._run.plan.servers[key]
        command = bare_command(
            vk_executable(self._environment),
            settings,
            prompt_tokens=self.cell.seq_len,
            output_tokens=self.cell.output_len,
            repeat=None,
        )
        chosen = server_environment(self._environment, settings, "")
        process = ServerProcess.start(command, log, chosen, listens=True)
        try:
            yield Loop(process, log)
        finally:
            process.stop()
            self._cleaner.log(log)

    def take(
        self,
        loop: Loop,
        server: LiveServer,
        attempt: Attempt,
        warm: Sequence[PromptRecord],
        prompts: Sequence[PromptRecord],
    ) -> BareBlock:
        """`TURNS` turns behind one that is not counted; what goes wrong ends them, as a reason."""
        taken: list[BareTurn] = []
        reason = None
        try:
            loop.ready(self._timeout_s)
            self._turn(loop, server, attempt, (*warm, *prompts)[0], bare_first=True)
            for number in range(TURNS):
                prompt = prompts[number % len(prompts)]
                first = (number + attempt.block) % 2 == 0
                taken.append(self._turn(loop, server, attempt, prompt, bare_first=first))
        except ServerFailed as error:
            reason = self._cleaner.text(str(error))
        return BareBlock(
            block=attempt.block, server_id=attempt.server_id, turns=tuple(taken), reason=reason
        )

    def with_block(self, known: BareLoop | None, block: BareBlock) -> BareLoop:
        """The record of the loop with one block more; its rate is over all turns."""
        blocks = (*(known.blocks if known else ()), block)
        turns = [turn for found in blocks for turn in found.turns]
        tokens, seconds = sum(t.bare_tokens for t in turns), sum(t.bare_seconds for t in turns)
        return BareLoop(
            decode_tok_s=tokens / seconds if turns else None,
            tokens=tokens if turns else None,
            seconds=seconds if turns else None,
            prompt_tokens=self.cell.seq_len if self.cell else None,
            output_tokens=self.cell.output_len if self.cell else None,
            reason=None if turns else block.reason,
            raw=None,
            blocks=blocks,
        )

    def _turn(
        self,
        loop: Loop,
        server: LiveServer,
        attempt: Attempt,
        prompt: PromptRecord,
        *,
        bare_first: bool,
    ) -> BareTurn:
        if bare_first:
            bare = loop.time(prompt.token_ids, self._timeout_s)
        http = _over_http(server, body_of(attempt, server, prompt), self._timeout_s)
        if not bare_first:
            bare = loop.time(prompt.token_ids, self._timeout_s)
        return BareTurn(
            prompt_index=prompt.index,
            first="bare" if bare_first else "http",
            bare_tokens=bare.tokens,
            bare_seconds=bare.seconds,
            http_tokens=http.tokens,
            http_seconds=http.seconds,
            same_tokens=bare.token_ids == http.token_ids,
        )


def _base_cell(run: Run) -> Cell | None:
    """The baseline's base cell, where the baseline has a loop of its own and runs on a CPU."""
    name = run.scenario.baseline
    if name is None or not arm(name).bare_loop:
        return None
    cells = (c for c in run.plan.cells if c.arm == name and c.axis == "base")
    return next((c for c in cells if run.plan.servers[c.server_key]["device"] == "cpu"), None)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens after the first, the seconds they took, and all ids."""

    tokens: int
    seconds: float
    token_ids: tuple[int, ...]


def _span(who: str, tokens: int, seconds: float, token_ids: tuple[int, ...]) -> Span:
    if tokens < 1 or seconds <= 0:
        raise ServerFailed(f"{who}: no rate, {tokens} tokens in {seconds:g} s")
    return Span(tokens, seconds, token_ids)


def _over_http(server: LiveServer, body: bytes, timeout_s: float) -> Span:
    async def ask() -> Span:
        async with StreamClient() as client:
            await client.connect(server.base_url, 1)
            got = await complete(client, server.base_url, body, timeout_s=timeout_s)
        if got.status != "ok" or got.token_source != "ids" or len(got.chunks) < 2:
            raise ServerFailed(f"a turn over HTTP: {got.error or 'no token ids in its chunks'}")
        tokens = len(got.token_ids) - got.first_chunk_tokens
        seconds = (got.chunks[-1][0] - got.chunks[0][0]) / 1e9
        return _span("a turn over HTTP", tokens, seconds, got.token_ids)

    try:
        return asyncio.run(ask())
    except (OSError, TimeoutError) as error:
        raise ServerFailed(f"a turn over HTTP: {error}") from error


class Loop:
    """The baseline's loop in a process of its own; it times a prompt when it is told to."""

    def __init__(self, process: ServerProcess, log: Path) -> None:
        self._process, self._log, self._heard = process, log, 0

    def ready(self, timeout_s: float) -> None:
        """Wait until its model is loaded. Errors: `ServerFailed`."""
        self._next(timeout_s)

    def time(self, prompt: Sequence[int], timeout_s: float) -> Span:
        """One prompt. Errors: `ServerFailed`."""
        try:
            self._process.say(json.dumps(list(prompt)))
        except BrokenPipeError:
            raise ServerFailed(self._ended()) from None
        told = self._next(timeout_s)
        try:
            ids = tuple(told["token_ids"])
            return _span("the bare loop", int(told["tokens"]), float(told["seconds"]), ids)
        except (KeyError, TypeError, ValueError) as error:
            raise ServerFailed(f"the bare loop told {str(told)[:200]}") from error

    def _next(self, timeout_s: float) -> dict[str, Any]:
        """The next document of its log, which only ever grows by whole lines."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            told = _documents(self._log)
            if len(told) > self._heard:
                self._heard += 1
                return told[self._heard - 1]
            if self._process.exit_code() is not None:
                raise ServerFailed(self._ended())
            time.sleep(_POLL_S)
        raise ServerFailed(f"the bare loop: no answer within {timeout_s:g} s")

    def _ended(self) -> str:
        code = self._process.wait(5.0)
        how = "no end" if code is None else describe_exit(code)
        return f"the bare loop ended ({how}): {' '.join(last_lines(self._log, 1))}"


def _documents(log: Path) -> list[dict[str, Any]]:
    found = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        if line.startswith("{") and line.endswith("\n"):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found
