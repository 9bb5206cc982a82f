"""Warm-up until times are steady: judged by a rule, never by a count alone.

A warm-up that is too short leaves compilation and cold caches in the measured window; one that
never becomes steady is a finding about the server and is reported as such.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from finalbench.client.http import StreamClient
from finalbench.client.load import run_cell
from finalbench.client.schedule import CellRun, Job, Load, Outcome
from finalbench.stats.steady import WarmRule, unsteady

__all__ = ["WarmRule", "WarmUp", "unsteady", "warm_up"]


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What the warm-up did. `reason` says why it is not steady."""

    rounds: int
    steady: bool
    reason: str | None
    first_token_ms: tuple[float, ...]
    per_token_ms: tuple[float, ...]
    outcomes: tuple[Outcome, ...]


async def warm_up(
    client: StreamClient,
    base_url: str,
    jobs: Sequence[Job],
    load: Load,
    rule: WarmRule | None = None,
    *,
    on_outcome: Callable[[Outcome], None] | None = None,
    stop: asyncio.Event | None = None,
    headers: dict[str, str] | None = None,
) -> WarmUp:
    """Rounds of `load.concurrency` jobs until steady, out of jobs, or at `rule.max_rounds`.

    Jobs are used once each, in order; they must have the measured length and none of its prompts.
    """
    rule = rule or WarmRule()
    size, outcomes = load.concurrency, []
    firsts: list[float] = []
    pers: list[float] = []
    closed = replace(load, mode="closed")
    reason: str | None = "no warm-up was sent"
    for number in range(min(rule.max_rounds, len(jobs) // size)):
        part = jobs[number * size : (number + 1) * size]
        cell: CellRun = await run_cell(
            client, base_url, part, closed, on_outcome=on_outcome, stop=stop, headers=headers
        )
        outcomes += cell.outcomes
        if cell.count("ok") < len(part):
            failed = next(o for o in cell.outcomes if o.result.status != "ok")
            reason = f"a warm-up request failed: {failed.result.error}"
            break
        firsts.append(statistics.median(map(_first_token_ms, cell.outcomes)))
        pers.append(statistics.median(map(_per_token_ms, cell.outcomes)))
        reason = unsteady(firsts, pers, rule)
        if reason is None:
            break
    return WarmUp(
        rounds=len(firsts),
        steady=reason is None,
        reason=reason,
        first_token_ms=tuple(firsts),
        per_token_ms=tuple(pers),
        outcomes=tuple(outcomes),
    )


def _first_token_ms(outcome: Outcome) -> float:
    result = outcome.result
    return (result.chunks[0][0] - result.sent_ns) / 1e6 if result.chunks else 0.0


def _per_token_ms(outcome: Outcome) -> float:
    """Mean over the tokens after the first chunk; 0 when there are none."""
    result = outcome.result
    rest = (result.token_count or 0) - result.first_chunk_tokens
    if rest <= 0 or not result.chunks:
        return 0.0
    return (result.chunks[-1][0] - result.chunks[0][0]) / rest / 1e6
