"""All rules over one run."""

from __future__ import annotations

from collections.abc import Iterator

from finalbench.metrics import CellRow, MetricsTable, measured
from finalbench.record import RequestRecord, RunRecords
from finalbench.validity.cache import check_cache
from finalbench.validity.clocks import check_clocks
from finalbench.validity.counts import check_counts
from finalbench.validity.drafts import check_drafts
from finalbench.validity.engine_counts import check_engine_counts
from finalbench.validity.gpu import check_gpu
from finalbench.validity.machine import check_client
from finalbench.validity.routing import check_routing
from finalbench.validity.samples import check_samples, check_warmth
from finalbench.validity.servers import check_servers
from finalbench.validity.violation import Violation, violation
from finalbench.validity.warmup import check_prompts, check_steady


def check(records: RunRecords, metrics: MetricsTable) -> list[Violation]:
    """Every breach, in the plan's order; an empty list means that nothing is wrong."""
    return list(_check(records, metrics))


def _check(records: RunRecords, metrics: MetricsTable) -> Iterator[Violation]:
    run = records.run
    grouped: dict[str, list[RequestRecord]] = {}
    for request in records.requests:
        grouped.setdefault(request.cell_id, []).append(request)
    servers = {s.server_id: s for s in records.servers}
    for cell in run.plan.cells:
        row = metrics.cell(cell.id)
        requests = measured(cell, grouped.get(cell.id, ()))
        yield from check_counts(cell, row, requests, ignore_eos=run.scenario.workload.ignore_eos)
        yield from check_clocks(cell, row, requests)
        yield from check_drafts(cell, row, requests)
        yield from check_samples(cell, row, requests, len(run.plan.blocks))
        yield from check_warmth(cell, requests)
        yield from check_steady(run, cell, grouped.get(cell.id, ()))
        yield from check_cache(cell, grouped.get(cell.id, ()), servers)
        yield from _physics(row)
        yield from check_client(cell, requests, run.client_ceilings)
    yield from check_prompts(run, records.requests)
    yield from check_servers(run, records.servers)
    yield from check_routing(run, records.servers)
    yield from check_engine_counts(records.servers, records.requests, records.scores)
    yield from check_gpu(records)
    for name in records.torn:
        yield violation("torn_journal", f"{name} ends in half a record, which was dropped")


def _physics(row: CellRow) -> Iterator[Violation]:
    if row.bandwidth_share is not None and row.bandwidth_share > 1:
        yield violation(
            "implausible",
            f"the rate needs {row.bandwidth_share:.2f} times the memory bandwidth",
            cell_id=row.id,
            share=row.bandwidth_share,
            bytes_per_step=row.bytes_per_step,
            limit_tok_s=row.limit_tok_s,
        )
