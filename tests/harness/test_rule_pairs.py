"""F10: every rule has a record it accepts and one it rejects, with the same thing in both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import test_cache_state as caches
import test_validity as built
from run_records import a_request, a_run, cell_of, make_records, provenance, scenario

from finalbench.metrics import MetricsTable, compute
from finalbench.record import RunRecords, Usage
from finalbench.validity import RULES, check

Judged = RunRecords | tuple[RunRecords, MetricsTable]
one, edit, servers, told, on_gpu = (
    built.one,
    built.edit,
    built.servers,
    built.told,
    built.on_gpu,
)
CLEAN, CELL, PLAIN, VICTIM, SPEC = (
    built.CLEAN,
    built.CELL,
    built.PLAIN,
    built.VICTIM,
    built.SPEC,
)


def row(**updates: Any) -> Judged:
    """The clean run with one row of its table edited."""
    table = compute(CLEAN)
    edited = table.cell(CELL.id).model_copy(update=updates)
    cells = tuple(edited if c.id == CELL.id else c for c in table.cells)
    return CLEAN, table.model_copy(update={"cells": cells})


def rate(factor: float) -> Judged:
    known = compute(CLEAN).cell(CELL.id).rates
    decode = known["decode_tok_s"]
    changed = decode.model_copy(update={"value": (decode.value or 0.0) * factor})
    return row(rates={**known, "decode_tok_s": changed})


def peak(factor: float) -> Judged:
    return row(peak_tok_s=(compute(CLEAN).cell(CELL.id).e2e_tok_s or 0.0) * factor)


def bandwidth(bytes_s: float) -> RunRecords:
    known = provenance(memory_bandwidth_bytes_s=bytes_s, memory_bandwidth_source="declared")
    return make_records(a_run(provenance=known))


def early_stop(reason: str) -> RunRecords:
    records = make_records(a_run(scenario(workload={"requests": 4, "ignore_eos": False})))
    plain = cell_of(records, "vk", "none")
    victim = next(r for r in records.requests if r.cell_id == plain.id)
    return edit(
        records,
        lambda r: r is victim,
        finish_reason=reason,
        token_ids=victim.token_ids[:5],
        chunks=victim.chunks[:5],
        usage=Usage(prompt=512, completion=5),
    )


def failures(count: int) -> RunRecords:
    """So many of a hundred."""
    records = make_records(a_run(scenario(workload={"requests": 100}, measure={"blocks": 1})))
    ids = [r.request_id for r in records.requests if r.arm == "stock"][:count]
    return edit(records, lambda r: r.request_id in ids, status="failed", error="x")


def accepted_drafts(count: int) -> RunRecords:
    """So many accepted in 100 rounds a request."""
    spec = SPEC.model_copy(
        update={
            "drafts": 100,
            "draft_tokens": 300,
            "accepted_tokens": count,
            "accepted_per_pos": (count, 0, 0),
        }
    )
    return edit(CLEAN, lambda r: r.cell_id == CELL.id, spec=spec)


def clocks(vk: float, stock: float) -> RunRecords:
    return on_gpu(lambda arm, i: vk if arm == "vk" else stock)


def samples(count: int) -> RunRecords:
    """So many readings of the clock while stock was busy, and all of vk."""
    steady = on_gpu(lambda arm, i: 1_980.0)
    stock = [r for r in steady.requests if r.arm == "stock"]
    inside = [
        t for t in steady.telemetry if any(r.sent_ns <= t.t_ns <= r.chunks[-1][0] for r in stock)
    ]
    kept = tuple(t for t in steady.telemetry if t not in inside[count:])
    return replace(steady, telemetry=kept)


def client(**updates: Any) -> RunRecords:
    known = {"chunks_per_s": 650.0} | updates
    return make_records(a_run(client_ceilings=(built.a_ceiling(**known),)))


def first_slow(factor: float) -> RunRecords:
    """Each server's first request of a cell takes so many times as long a token."""
    firsts = [r for r in CLEAN.requests if r.cell_id == PLAIN.id and r.prompt_index == 0]
    slow = {
        r.request_id: tuple(
            (r.chunks[0][0] + round((at - r.chunks[0][0]) * factor), n) for at, n in r.chunks
        )
        for r in firsts
    }
    requests = tuple(
        r.model_copy(
            update={"chunks": slow[r.request_id], "done_ns": slow[r.request_id][-1][0] + 1}
        )
        if r.request_id in slow
        else r
        for r in CLEAN.requests
    )
    return replace(CLEAN, requests=requests)


def warm_up_of(index: int) -> RunRecords:
    """A warm-up request with the prompt of a measured one, or with its own."""
    warm = a_request(CELL, index=1, warmup=True)
    digest = built.prompt_digest(CELL.seq_len, index, warmup=index > 3)
    return replace(
        CLEAN, requests=(warm.model_copy(update={"prompt_digest": digest}), *CLEAN.requests)
    )


def warmed(*times_ms: float) -> RunRecords:
    """The base cell alone, with these times in its warm-up by rule."""
    records = built.warmed(*times_ms)
    return replace(records, requests=tuple(r for r in records.requests if r.cell_id == CELL.id))


def hits(late: float) -> RunRecords:
    return servers(
        lambda s: {
            "counters_before": {"prefix_cache_hits": 5.0},
            "counters_after": {"prefix_cache_hits": late},
        }
    )


def cached(warm: int, **settings: Any) -> RunRecords:
    known = {"cold": 0, "warm": warm * caches.REQUESTS, "prefix-50": 256 * caches.REQUESTS}
    return caches.counted(known, **settings)


def routed(last: float) -> RunRecords:
    return built.random_moe({"distinct_experts": [8.0, 15.7, 23.0, last]})


def busy(share: float) -> RunRecords:
    return built.sensed("gpu_busy_share", lambda arm, i: share, built.SLOW)


def sensor(name: str, value: float) -> RunRecords:
    return built.sensed(name, lambda arm, i: value if i == 3 else 1.0)


def in_flight(earlier_ms: int) -> RunRecords:
    sent = VICTIM.sent_ns - earlier_ms * built.MS
    return one(scheduled_ns=sent, sent_ns=sent)


def blocks(count: int, requests: int = 4) -> RunRecords:
    return built._small(count, requests)


def dropped(block: int) -> RunRecords:
    return replace(CLEAN, requests=tuple(r for r in CLEAN.requests if r.block != block))


def source(name: str) -> RunRecords:
    return one(token_source=name, token_ids=() if name == "usage" else VICTIM.token_ids)


# (what it accepts, what it rejects), each close to the bound where there is one.
PAIRS: dict[str, tuple[Callable[[], Judged], Callable[[], Judged]]] = {
    "rate_identity": (lambda: rate(1 + 1e-10), lambda: rate(1 + 1e-8)),
    "out_of_range": (lambda: row(goodput_share=1.0), lambda: row(goodput_share=1.01)),
    "peak_below_mean": (lambda: peak(1.0), lambda: peak(0.99)),
    "time_order": (
        lambda: one(scheduled_ns=VICTIM.sent_ns),
        lambda: one(scheduled_ns=VICTIM.sent_ns + 1),
    ),
    "in_flight": (lambda: in_flight(0), lambda: in_flight(200)),
    "request_count": (lambda: CLEAN, lambda: built._dropped(1)),
    "failures": (lambda: failures(1), lambda: failures(2)),
    "retried": (
        lambda: one(status="failed", error="cut", spec=None),
        lambda: built._retried(),
    ),
    "credited_fault": (lambda: one(finish_reason="length"), lambda: one(finish_reason="abort")),
    "token_source_mismatch": (
        lambda: one(usage=Usage(prompt=512, completion=32)),
        lambda: one(usage=Usage(prompt=512, completion=31)),
    ),
    "token_source_mixed": (lambda: source("ids"), lambda: source("usage")),
    "engine_count": (lambda: built.counted(), lambda: built.counted(generation_tokens=-1)),
    "prompt_length": (
        lambda: one(prompt_token_ids=(1,) * 512),
        lambda: one(prompt_token_ids=(1,) * 511),
    ),
    "output_length": (
        lambda: early_stop("stop"),
        lambda: edit(early_stop("stop"), lambda r: r.finish_reason == "stop", token_ids=(1,) * 33),
    ),
    "finish_reason": (lambda: early_stop("stop"), lambda: early_stop("length")),
    "draft_identity": (
        lambda: one(spec=SPEC),
        lambda: one(spec=SPEC.model_copy(update={"accepted_tokens": SPEC.draft_tokens + 1})),
    ),
    "acceptance_unknown": (lambda: one(spec=SPEC), lambda: one(spec=None)),
    "acceptance_low": (lambda: accepted_drafts(3), lambda: accepted_drafts(1)),
    "implausible": (lambda: bandwidth(400e9), lambda: bandwidth(4e9)),
    "wrong_server": (
        lambda: servers(lambda s: {"nonce": "n", **told("nonce", "n")(s)}),
        lambda: servers(told("nonce", "n")),
    ),
    "server_changed": (
        lambda: servers(lambda s: {"settings_after": {**(s.settings or {}), "host_launch_us": 9}}),
        lambda: servers(lambda s: {"settings_after": {**(s.settings or {}), "threads": 9}}),
    ),
    "settings_unread": (
        lambda: servers(lambda s: {"purpose": "score", "settings": None}),
        lambda: servers(lambda s: {"settings": None}),
    ),
    "settings_differ": (
        lambda: servers(told("kernel_fallbacks", ["conv"])),
        lambda: servers(told("dtype", "bfloat16")),
    ),
    "class_mismatch": (
        lambda: servers(told("weights", "real")),
        lambda: servers(told("weights", "random:1")),
    ),
    "correlated_routing": (lambda: routed(29.7), lambda: routed(29.0)),
    "kernel_fallback": (
        lambda: servers(told("kernel_fallbacks", [])),
        lambda: servers(told("kernel_fallbacks", ["conv"])),
    ),
    "warm_prompt": (lambda: warm_up_of(9), lambda: warm_up_of(1)),
    "warm_up_unsteady": (
        lambda: warmed(10.0, 10.0, 10.5),
        lambda: warmed(10.0, 10.0, 20.0),
    ),
    "repeated_prompt": (
        lambda: edit(CLEAN, lambda r: r.cell_id == CELL.id, prompt_digest="a" * 64),
        lambda: edit(CLEAN, lambda r: r.cell_id == CELL.id, prompt_digest="a" * 64, seed=1),
    ),
    "warm_prefix": (lambda: hits(5.0), lambda: hits(6.0)),
    "cache_state": (lambda: cached(448), lambda: cached(447)),
    "cache_absent": (lambda: cached(512), lambda: cached(0, queries=0)),
    "cold_start": (lambda: first_slow(1.15), lambda: first_slow(1.3)),
    "few_blocks": (lambda: blocks(3), lambda: blocks(2)),
    "few_requests": (lambda: blocks(5, 2), lambda: blocks(3, 3)),
    "missing_block": (lambda: blocks(3), lambda: dropped(2)),
    "clock_confounded": (
        lambda: clocks(1_980.0, 1_980.0 / 1.0099),
        lambda: clocks(1_980.0, 1_980.0 / 1.03),
    ),
    "clock_unsteady": (
        lambda: on_gpu(lambda arm, i: 1_980.0 - 90.0 * (i % 2)),
        lambda: on_gpu(lambda arm, i: 1_980.0 - 110.0 * (i % 2)),
    ),
    "clock_unobserved": (lambda: samples(30), lambda: samples(29)),
    "gpu_idle": (lambda: busy(0.5), lambda: busy(0.49)),
    "gpu_throttled": (
        lambda: sensor("gpu_clock_reasons", 0x4),
        lambda: sensor("gpu_clock_reasons", 0x8),
    ),
    "gpu_shared": (lambda: sensor("gpu_processes", 1.0), lambda: sensor("gpu_processes", 2.0)),
    "client_bound": (lambda: client(), lambda: client(chunks_per_s=550.0)),
    "client_late": (lambda: client(added_p99_ms=10.0), lambda: client(added_p99_ms=10.1)),
    "client_unmeasured": (lambda: client(), lambda: client(chunks_per_s=None, reason="no toy")),
    "torn_journal": (lambda: replace(CLEAN, torn=()), lambda: replace(CLEAN, torn=("x.jsonl",))),
}


def broken(judged: Judged) -> set[str]:
    records, table = judged if isinstance(judged, tuple) else (judged, compute(judged))
    return {v.rule for v in check(records, table)}


def test_every_rule_has_its_pair() -> None:
    assert set(PAIRS) == set(RULES)


@pytest.mark.parametrize("rule", PAIRS)
def test_f10_a_rule_accepts_one_and_rejects_the_other(rule: str) -> None:
    accepted, rejected = PAIRS[rule]
    assert rule not in broken(accepted())
    assert rule in broken(rejected())
