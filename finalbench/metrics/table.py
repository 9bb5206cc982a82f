"""Raw records -> the rows of metrics.json. Derived only; nothing is taken from a server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from finalbench.metrics.acceptance import Acceptance, acceptance
from finalbench.metrics.bandwidth import Memory, bandwidth_bound, memory_of
from finalbench.metrics.cache import cache_use
from finalbench.metrics.latency import goodput, latency_table, token_weighted_tpot
from finalbench.metrics.rates import (
    Rate,
    decode_rate,
    e2e_rate,
    missing,
    peak_rate,
    pooled,
    sources,
    steady_rate,
)
from finalbench.metrics.rows import BlockRow, CellRow, Counts, DomainRow, MetricsTable
from finalbench.metrics.timing import Timing, is_valid, timing
from finalbench.plan import Cell
from finalbench.record import RequestRecord, RunRecords, ServerRecord, Spec
from finalbench.scenario import Limits, ModelSpec
from finalbench.stats import mean_interval


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The measured requests of one cell at one server: times are comparable only among these."""

    block: int
    server_id: str
    requests: list[RequestRecord]
    timings: list[Timing]


def compute(records: RunRecords, *, limits: Limits | None = None) -> MetricsTable:
    """All rows of a run, in the plan's order. `limits` in place of those of the scenario."""
    limits = limits or records.run.scenario.workload.limits
    servers = {s.server_id: s for s in records.servers}
    memory = memory_of(records.run.provenance.hardware, records.servers)
    by_cell: dict[str, list[RequestRecord]] = {}
    for request in records.requests:
        by_cell.setdefault(request.cell_id, []).append(request)
    rows = [
        compute_cell(
            cell,
            by_cell.get(cell.id, []),
            servers=servers,
            model=records.run.scenario.model,
            memory=memory,
            limits=limits,
        )
        for cell in records.run.plan.cells
    ]
    if records.run.classes.weights == "random":
        # Such a row has the shape of a model and is never named as the model.
        rows = [row.model_copy(update={"model": f"{row.model} shape"}) for row in rows]
    return MetricsTable(run_id=records.run.run_id, memory=memory, cells=tuple(rows))


def measured(cell: Cell, requests: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The requests that count: no warm-up, one for each prompt of each block.

    Of several attempts at one prompt the first that ended well counts, so that no later and
    luckier one can replace it; without one, the last attempt.
    """
    chosen: dict[tuple[int, int], RequestRecord] = {}
    for request in requests:
        key = (request.block, request.prompt_index)
        if not request.warmup and (key not in chosen or chosen[key].status != "ok"):
            chosen[key] = request
    return [chosen[key] for key in sorted(chosen)]


def compute_cell(
    cell: Cell,
    requests: Sequence[RequestRecord],
    *,
    servers: dict[str, ServerRecord],
    model: ModelSpec,
    memory: Memory,
    limits: Limits | None = None,
) -> CellRow:
    """One row from the raw requests of one cell, warm-ups included in `requests`."""
    attempts = _attempts(measured(cell, requests))
    timings = [t for a in attempts for t in a.timings]
    blocks = _blocks(cell, attempts, servers)
    rates = {
        "decode_tok_s": pooled([b.decode for b in blocks]),
        "e2e_tok_s": pooled([b.e2e for b in blocks]),
        "steady_tok_s": pooled([b.steady for b in blocks]),
        "peak_tok_s": _best([peak_rate(a.timings) for a in attempts]),
    }
    drafts = _acceptance(cell, attempts, servers)
    reasons = {name: rate.reason for name, rate in rates.items() if rate.reason}
    if drafts.reason:
        reasons["acceptance_length"] = drafts.reason
    whole = rates["decode_tok_s"] if cell.concurrency == 1 else rates["steady_tok_s"]
    bound = bandwidth_bound(model, cell, whole.value, drafts.length, memory)
    if bound.reason:
        reasons["bandwidth_share"] = bound.reason
        if bound.limit_tok_s is None:
            reasons["limit_tok_s"] = bound.reason
    good, goodput_reason = goodput(timings, cell.requests * len(blocks), limits)
    if goodput_reason:
        reasons["goodput_share"] = goodput_reason
    cache = cache_use(cell, requests, servers)
    if cache is not None and cache.reason:
        reasons["cache_hit_share"] = cache.reason
    interval, interval_reason = _interval(blocks)
    if interval_reason:
        reasons["decode_tok_s_interval"] = interval_reason
    weighted = token_weighted_tpot(timings)
    if weighted is None:
        reasons["tpot_token_weighted_s"] = "no valid request with a second token"
    latencies = latency_table(timings)
    reasons |= {
        f"{name}.{part}": why for name, d in latencies.items() for part, why in d.reasons.items()
    }
    runtimes = {servers[a.server_id].runtime for a in attempts if a.server_id in servers}
    return CellRow(
        id=cell.id,
        pair_key=cell.pair_key,
        model=cell.model,
        arm=cell.arm,
        axis=cell.axis,
        seq_len=cell.seq_len,
        output_len=cell.output_len,
        sampling=cell.sampling.name,
        sampling_fields=cell.sampling.fields(),
        draft=cell.draft.model_dump(mode="json"),
        draft_label=cell.draft.label,
        concurrency=cell.concurrency,
        text_class=cell.text_class,
        domain=cell.domain,
        runtime=next(iter(runtimes)) if len(runtimes) == 1 else None,
        counts=_counts(cell.requests * len(blocks), attempts, requests),
        token_source=sources([t for t in timings if t.valid]),
        decode_tok_s=rates["decode_tok_s"].value,
        decode_tok_s_blocks=tuple(b.decode.value for b in blocks),
        decode_tok_s_interval=interval,
        e2e_tok_s=rates["e2e_tok_s"].value,
        steady_tok_s=rates["steady_tok_s"].value,
        peak_tok_s=rates["peak_tok_s"].value,
        rates=rates,
        latencies=latencies,
        tpot_token_weighted_s=weighted,
        acceptance=drafts,
        acceptance_length=drafts.length,
        goodput_share=good,
        bandwidth_share=bound.share,
        limit_tok_s=bound.limit_tok_s,
        bytes_per_step=bound.bytes_per_step,
        blocks=blocks,
        domains=_domains(cell, attempts),
        reasons=reasons,
        cache=cell.cache,
        cache_hit_share=None if cache is None else cache.hit_share,
    )


def _attempts(requests: Sequence[RequestRecord]) -> list[_Attempt]:
    grouped: dict[tuple[int, int, str], list[RequestRecord]] = {}
    for request in requests:
        key = (request.block, request.roll, request.server_id)
        grouped.setdefault(key, []).append(request)
    return [
        _Attempt(block, server_id, found, [timing(r) for r in found])
        for (block, _, server_id), found in sorted(grouped.items())
    ]


def _blocks(
    cell: Cell, attempts: Sequence[_Attempt], servers: dict[str, ServerRecord]
) -> tuple[BlockRow, ...]:
    """One row per block; a block that took several servers adds what each of them did."""
    rows = []
    for block in sorted({a.block for a in attempts}):
        own = [a for a in attempts if a.block == block]
        known = [servers[a.server_id] for a in own if a.server_id in servers]
        rows.append(
            BlockRow(
                block=block,
                server_ids=tuple(a.server_id for a in own),
                order_index=known[0].order_index if known else None,
                decode=pooled([decode_rate(a.timings, cell.concurrency) for a in own]),
                e2e=pooled([e2e_rate(a.timings) for a in own]),
                steady=pooled([steady_rate(a.timings, cell.concurrency) for a in own]),
                acceptance=_acceptance(cell, own, servers),
            )
        )
    return tuple(rows)


def _acceptance(
    cell: Cell, attempts: Sequence[_Attempt], servers: dict[str, ServerRecord]
) -> Acceptance:
    """From each request's counters, or from the server's over the cell where it has only those."""
    if cell.draft.method == "none":
        return Acceptance(length=None, reason="no drafts in this cell")
    specs: list[Spec | None] = []
    for attempt in attempts:
        valid = [r for r in attempt.requests if is_valid(r)]
        windows = _windows(servers.get(attempt.server_id), cell)
        if windows and valid and all(r.spec is None for r in valid):
            specs += windows
        else:
            specs += [r.spec for r in valid]
    if not specs:
        return Acceptance(length=None, reason="no valid request")
    return acceptance(specs)


def _by_request(cell: Cell, requests: Sequence[RequestRecord]) -> Acceptance:
    """Of some requests of a cell: only counters that came with a request can be told apart."""
    valid = [r for r in requests if is_valid(r)]
    if cell.draft.method == "none" or not valid:
        return Acceptance(length=None, reason="no drafts, or no valid request")
    return acceptance(r.spec for r in valid)


def _windows(server: ServerRecord | None, cell: Cell) -> list[Spec]:
    windows = () if server is None else server.windows
    return [w.spec for w in windows if w.cell_id == cell.id and w.spec is not None]


def _best(rates: Sequence[Rate]) -> Rate:
    # The mean is over all blocks, so a peak of only some of them could be below it.
    values = [r.value for r in rates if r.value is not None]
    if not rates or len(values) < len(rates):
        return missing(next((r.reason for r in rates if r.reason), "no block was measured"))
    return rates[values.index(max(values))]


def _counts(
    scheduled: int, attempts: Sequence[_Attempt], requests: Sequence[RequestRecord]
) -> Counts:
    status = [r.status for a in attempts for r in a.requests]
    warmup = sum(r.warmup for r in requests)
    return Counts(
        scheduled=scheduled,
        recorded=len(status),
        ok=status.count("ok"),
        failed=status.count("failed"),
        cancelled=status.count("cancelled"),
        incomplete=status.count("incomplete"),
        repeated=len(requests) - warmup - len(status),
        warmup=warmup,
    )


def _interval(blocks: Sequence[BlockRow]) -> tuple[tuple[float, float] | None, str | None]:
    """Student interval of the mean over blocks."""
    values = [b.decode.value for b in blocks if b.decode.value is not None]
    if not values:
        return None, "no block has a decode rate"
    found = mean_interval(values)
    if found.low is None or found.high is None:
        return None, found.reason
    return (found.low, found.high), None


def _domains(cell: Cell, attempts: Sequence[_Attempt]) -> tuple[DomainRow, ...]:
    grouped: dict[str, list[tuple[RequestRecord, Timing]]] = {}
    for attempt in attempts:
        for request, one in zip(attempt.requests, attempt.timings, strict=True):
            if request.domain is not None:
                grouped.setdefault(request.domain, []).append((request, one))
    rows = []
    for domain, found in sorted(grouped.items()):
        rate = decode_rate([t for _, t in found], cell.concurrency)
        rows.append(
            DomainRow(
                domain=domain,
                requests=len(found),
                decode_tok_s=rate.value,
                acceptance_length=_by_request(cell, [r for r, _ in found]).length,
                reason=rate.reason,
            )
        )
    return tuple(rows)
