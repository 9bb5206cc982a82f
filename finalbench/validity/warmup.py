"""Warm-up: its prompts are its own, and it went on until times were steady."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from finalbench.metrics import timing, tpot_s
from finalbench.plan import Cell
from finalbench.record import RequestRecord, Run
from finalbench.stats.steady import unsteady
from finalbench.validity.violation import Violation, violation


def check_prompts(run: Run, requests: Sequence[RequestRecord]) -> Iterator[Violation]:
    """No prompt of a warm-up may be measured on the same server, but in cells that are warm."""
    known = {cell.id for cell in run.plan.cells if cell.cache == "warm"}
    warm: dict[str, set[str]] = {}
    for request in requests:
        if request.warmup:
            warm.setdefault(request.server_id, set()).add(request.prompt_digest)
    reported: set[tuple[str, str]] = set()
    for request in requests:
        key = (request.cell_id, request.server_id)
        if (
            not request.warmup
            and request.cell_id not in known
            and key not in reported
            and request.prompt_digest in warm.get(request.server_id, ())
        ):
            reported.add(key)
            yield violation(
                "warm_prompt",
                f"request {request.request_id} repeats a warm-up prompt of {request.server_id}",
                cell_id=request.cell_id,
                block=request.block,
            )


def check_steady(run: Run, cell: Cell, requests: Sequence[RequestRecord]) -> Iterator[Violation]:
    """Judged from the warm-up's own requests, by the rule that ended it.

    `requests` are all of the cell. A server that measured nothing of it is passed over.
    """
    rule = run.scenario.workload.warm_rule
    if rule is None:
        return
    served = dict.fromkeys((r.server_id, r.block) for r in requests if not r.warmup)
    for server_id, block in served:
        own = [r for r in requests if r.warmup and r.server_id == server_id]
        if cell.cache == "warm":  # what put its prompts into the cache is no round of the rule
            sent = {r.prompt_digest for r in requests if not r.warmup}
            own = [r for r in own if r.prompt_digest not in sent]
        firsts, pers = rounds(own, cell.concurrency)
        reason = unsteady(firsts, pers, rule)
        if reason is not None:
            yield violation(
                "warm_up_unsteady",
                f"after {len(firsts)} rounds on {server_id}: {reason}",
                cell_id=cell.id,
                block=block,
                rounds=len(firsts),
                most=rule.max_rounds,
            )


def rounds(requests: Sequence[RequestRecord], size: int) -> tuple[list[float], list[float]]:
    """Median time to first token and per token of each whole round of good requests, ms."""
    ordered = sorted(requests, key=lambda r: r.sent_ns)
    firsts: list[float] = []
    pers: list[float] = []
    for start in range(0, len(ordered) - size + 1, size):
        part = ordered[start : start + size]
        if any(r.status != "ok" or not r.chunks for r in part):
            break
        firsts.append(median((r.chunks[0][0] - r.sent_ns) / 1e6 for r in part))
        pers.append(median((tpot_s(timing(r)) or 0.0) * 1e3 for r in part))
    return firsts, pers
