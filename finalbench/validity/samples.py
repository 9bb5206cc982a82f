"""Enough fresh processes, enough requests, no prompt met before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from finalbench.metrics import CellRow, timing, tpot_s
from finalbench.plan import Cell
from finalbench.record import RequestRecord
from finalbench.validity.violation import Violation, violation

MIN_BLOCKS = 3
MIN_REQUESTS = 10
MIN_FOR_WARMTH = 3
MAX_COLD_RATIO = 1.2


def check_samples(
    cell: Cell, row: CellRow, requests: Sequence[RequestRecord], planned_blocks: int
) -> Iterator[Violation]:
    blocks = {r.block for r in requests}
    if len(blocks) < planned_blocks:
        yield violation(
            "missing_block",
            f"{len(blocks)} of {planned_blocks} planned blocks were measured",
            cell_id=cell.id,
            measured=len(blocks),
            planned=planned_blocks,
        )
    if len(blocks) < MIN_BLOCKS:
        yield violation(
            "few_blocks",
            f"{len(blocks)} blocks of fresh processes; {MIN_BLOCKS} are the least for an interval "
            "worth reading",
            cell_id=cell.id,
            blocks=len(blocks),
        )
    if row.counts.ok < MIN_REQUESTS:
        yield violation(
            "few_requests",
            f"{row.counts.ok} requests in all blocks together",
            cell_id=cell.id,
            requests=row.counts.ok,
        )
    times = Counter((r.server_id, r.prompt_digest, r.seed) for r in requests)
    repeated = [key for key, n in times.items() if n > 1]
    if repeated:
        yield violation(
            "repeated_prompt",
            f"{len(repeated)} of {len(times)} prompts were sent more than once to one server",
            cell_id=cell.id,
            repeated=len(repeated),
            distinct=len(times),
        )


def check_warmth(cell: Cell, requests: Sequence[RequestRecord]) -> Iterator[Violation]:
    """The first request on each server against the others: compilation or caches still cold."""
    by_server: dict[str, list[RequestRecord]] = {}
    for request in requests:
        by_server.setdefault(request.server_id, []).append(request)
    ratios: list[float] = []
    for found in by_server.values():
        times = [tpot_s(timing(r)) for r in sorted(found, key=lambda r: r.sent_ns)]
        known = [t for t in times if t is not None and t > 0]
        if len(known) == len(times) >= MIN_FOR_WARMTH:
            ratios.append(known[0] / median(known[1:]))
    if ratios and median(ratios) > MAX_COLD_RATIO:
        yield violation(
            "cold_start",
            f"the first request takes {median(ratios):.2f} times as long a token as the others",
            cell_id=cell.id,
            ratio=median(ratios),
            bound=MAX_COLD_RATIO,
        )
