"""One cell's requests against one live server, as records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from finalbench.arms import ENGINES, arm
from finalbench.client.http import StreamClient
from finalbench.client.load import Job, Load, Outcome, run_cell
from finalbench.client.stream import encode_body
from finalbench.client.warmup import warm_up
from finalbench.client.workload import Prompt, request_body
from finalbench.record import Cell, PromptRecord, RequestRecord, Spec, Usage
from finalbench.runner.interrupts import Interrupts
from finalbench.runtime.server import LiveServer
from finalbench.scenario import Workload

_DEATH_POLLS, _DEATH_POLL_S = 25, 0.02


@dataclass(frozen=True, slots=True)
class Attempt:
    """Where a batch of requests belongs. The prompts of a warm-up by rule are what it may use."""

    cell: Cell
    block: int
    roll: int
    server_id: str
    warmup: bool
    workload: Workload
    primes: bool = False  # a warm-up that puts what will be measured into the server's cache

    @property
    def output_len(self) -> int:
        """Tokens to ask for."""
        whole = self.cell.output_len
        return min(self.workload.warmup_output_len, whole) if self.warmup else whole

    def load(self, timeout_s: float) -> Load:
        """A warm-up is a closed loop, whatever comes after it."""
        return Load(
            mode="closed" if self.warmup else self.workload.arrivals,
            rate_per_s=self.workload.rate_per_s,
            seed=int(self.cell.pair_key, 16),  # the same arrivals in every arm and block
            concurrency=self.cell.concurrency,
            request_timeout_s=timeout_s,
        )


def request_seed(prompt: PromptRecord) -> int:
    """One seed for one prompt: equal with drafts on and off, in every arm and block."""
    return int(prompt.digest[:8], 16)


def run_requests(
    server: LiveServer,
    attempt: Attempt,
    prompts: Sequence[PromptRecord],
    *,
    timeout_s: float,
    interrupts: Interrupts,
    on_record: Callable[[RequestRecord], None],
) -> str | None:
    """Send each prompt once, `concurrency` at a time; records come as requests end.

    A warm-up by rule sends whole rounds until times are steady or its prompts are used up.

    Returns why the server is of no more use, or None. KeyboardInterrupt after a signal, once the
    requests in flight are recorded as cancelled.
    """
    stopped, trouble = asyncio.run(_run(server, attempt, prompts, timeout_s, interrupts, on_record))
    if stopped:
        raise KeyboardInterrupt
    if trouble is None:
        return server.died()
    # A process that closed our connection may take a moment to be seen as ended.
    for _ in range(_DEATH_POLLS):
        if (reason := server.died()) is not None:
            return reason
        time.sleep(_DEATH_POLL_S)
    return trouble or None


async def _run(
    server: LiveServer,
    attempt: Attempt,
    prompts: Sequence[PromptRecord],
    timeout_s: float,
    interrupts: Interrupts,
    on_record: Callable[[RequestRecord], None],
) -> tuple[bool, str | None]:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    signals: list[bool] = []
    trouble: list[str] = []

    def interrupted() -> None:
        signals.append(True)
        loop.call_soon_threadsafe(stop.set)  # also wakes the loop

    def ended(outcome: Outcome) -> None:
        on_record(_record(attempt, prompts[outcome.job.index], outcome))
        if outcome.result.status == "ok" or stop.is_set():
            return
        error = outcome.result.error or ""
        if server.died() is not None or error.startswith(("timed out", "cannot connect")):
            trouble[:] = [f"a request {error}"]
            stop.set()
        elif outcome.result.http_status in (None, 200) and not trouble:
            trouble.append("")  # perhaps its end, perhaps a fault of this request alone

    jobs = [Job(i, body_of(attempt, server, prompt)) for i, prompt in enumerate(prompts)]
    load = attempt.load(timeout_s)
    with interrupts.diverted(interrupted):
        async with StreamClient() as client:
            url = server.base_url
            by_rule = attempt.warmup and not attempt.primes
            rule = attempt.workload.warm_rule if by_rule else None
            if rule is None:
                await run_cell(client, url, jobs, load, on_outcome=ended, stop=stop)
            else:
                await warm_up(client, url, jobs, load, rule, on_outcome=ended, stop=stop)
    return bool(signals), trouble[0] if trouble else None


def body_of(attempt: Attempt, server: LiveServer, prompt: PromptRecord) -> bytes:
    """What is sent for a prompt, ready to go."""
    sent = Prompt(prompt.index, prompt.domain, prompt.token_ids, prompt.digest)
    body = request_body(
        sent,
        model=server.model_id,
        output_len=attempt.output_len,
        sampling=attempt.cell.sampling,
        draft=attempt.cell.draft,
        seed=request_seed(prompt),
        ignore_eos=attempt.workload.ignore_eos,
    )
    return encode_body(ENGINES[arm(attempt.cell.arm).engine].body(body))


def _record(attempt: Attempt, prompt: PromptRecord, outcome: Outcome) -> RequestRecord:
    result = outcome.result
    tag = "p" if attempt.primes else "w" if attempt.warmup else "q"
    return RequestRecord(
        request_id=f"{attempt.cell.id}-b{attempt.block}-r{attempt.roll}-{tag}{prompt.index}",
        cell_id=attempt.cell.id,
        block=attempt.block,
        roll=attempt.roll,
        server_id=attempt.server_id,
        arm=attempt.cell.arm,
        warmup=attempt.warmup,
        prompt_index=prompt.index,
        prompt_digest=prompt.digest,
        prompt_tokens=prompt.seq_len,
        prompt_token_ids=None,  # stored once, in prompts.jsonl.zst
        domain=prompt.domain,
        seed=request_seed(prompt),
        scheduled_ns=outcome.scheduled_ns,
        sent_ns=result.sent_ns,
        connect_ns=result.connect_ns,
        chunks=result.chunks,
        done_ns=result.done_ns,
        token_ids=result.token_ids,
        first_chunk_tokens=result.first_chunk_tokens,
        text=result.text,
        usage=Usage(prompt=result.usage.prompt, completion=result.usage.completion)
        if result.usage
        else None,
        token_source=result.token_source,
        finish_reason=result.finish_reason,
        stop_reason=result.stop_reason,
        done_seen=result.done_seen,
        http_status=result.http_status,
        spec=Spec(
            drafts=result.spec.drafts,
            draft_tokens=result.spec.draft_tokens,
            accepted_tokens=result.spec.accepted_tokens,
            accepted_per_pos=result.spec.accepted_per_pos,
        )
        if result.spec
        else None,
        status=result.status,
        error=result.error,
    )
