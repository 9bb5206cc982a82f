"""Every rule: a whole clean run breaks none, and one planted fault breaks exactly its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_records import (
    MS,
    SCENARIO,
    a_request,
    a_run,
    cell_of,
    edit,
    make_records,
    prompt_digest,
    provenance,
    scenario,
)

from finalbench.metrics import compute
from finalbench.record import (
    Classes,
    ClientCeiling,
    RequestRecord,
    RunRecords,
    ServerRecord,
    Spec,
    TelemetryRecord,
    Usage,
)
from finalbench.validity import RULES, Violation, check, spec_faults
from finalbench.validity.gpu import busy_samples, busy_share
from finalbench.validity.samples import check_warmth

CLEAN = make_records()
CELL = cell_of(CLEAN, "vk", "mtp3")
PLAIN = cell_of(CLEAN, "vk", "none")


def found(records: RunRecords) -> list[Violation]:
    return check(records, compute(records))


def rules(records: RunRecords) -> set[str]:
    return {v.rule for v in found(records)}


def one(records: RunRecords = CLEAN, **updates: Any) -> RunRecords:
    """One measured request of the base cell changed."""
    victim = next(r for r in records.requests if r.cell_id == CELL.id and r.prompt_index == 1)
    return edit(records, lambda r: r is victim, **updates)


def servers(change: Callable[[ServerRecord], dict[str, Any]], arm: str = "vk") -> RunRecords:
    changed = tuple(
        s.model_copy(update=change(s)) if s.arm == arm and s.block == 1 else s
        for s in CLEAN.servers
    )
    return replace(CLEAN, servers=changed)


def told(name: str, value: object) -> Callable[[ServerRecord], dict[str, Any]]:
    """A server that reports another value of one setting, before and after."""
    return lambda s: {
        "settings": {**(s.settings or {}), name: value},
        "settings_after": {**(s.settings_after or {}), name: value},
    }


def test_f10_a_clean_run_breaks_no_rule() -> None:
    assert found(CLEAN) == []


VICTIM = next(r for r in CLEAN.requests if r.cell_id == CELL.id and r.prompt_index == 1)
SPEC = VICTIM.spec
assert SPEC is not None


def _many(count: int, **updates: Any) -> RunRecords:
    ids = [r.request_id for r in CLEAN.requests if r.cell_id == CELL.id][:count]
    return edit(CLEAN, lambda r: r.request_id in ids, **updates)


def _dropped(count: int) -> RunRecords:
    ids = [r.request_id for r in CLEAN.requests if r.cell_id == CELL.id][:count]
    return replace(CLEAN, requests=tuple(r for r in CLEAN.requests if r.request_id not in ids))


def _warm() -> RunRecords:
    warm = a_request(CELL, index=1, warmup=True)
    warm = warm.model_copy(update={"prompt_digest": prompt_digest(CELL.seq_len, 1)})
    return replace(CLEAN, requests=(warm, *CLEAN.requests))


def _small(blocks: int, requests: int) -> RunRecords:
    spec = scenario(workload={"requests": requests}, measure={"blocks": blocks})
    return make_records(a_run(spec))


def _retried() -> RunRecords:
    failed = VICTIM.model_copy(
        update={"status": "failed", "error": "cut", "request_id": "earlier", "spec": None}
    )
    return replace(CLEAN, requests=(failed, *CLEAN.requests))


REJECTED: list[tuple[str, str, RunRecords]] = [
    ("T05-usage-of-one", "token_source_mismatch", one(usage=Usage(prompt=512, completion=1))),
    ("T06-chunks", "token_source_mismatch", one(chunks=VICTIM.chunks[:-1])),
    (
        "T05-long-text",
        "token_source_mismatch",
        one(text="x" * 32 * 129),
    ),
    ("first-chunk", "token_source_mismatch", one(first_chunk_tokens=33)),
    (
        "T09-mixed-sources",
        "token_source_mixed",
        one(token_ids=(), token_source="usage"),
    ),
    ("W01-received", "prompt_length", one(usage=Usage(prompt=511, completion=32))),
    ("W01-asked", "prompt_length", one(prompt_tokens=500, usage=Usage(prompt=500, completion=32))),
    ("W04-sent", "prompt_length", one(prompt_token_ids=(1, 2, 3))),
    (
        "T03-early-end",
        "output_length",
        _many(
            1,
            token_ids=VICTIM.token_ids[:3],
            usage=Usage(prompt=512, completion=3),
            chunks=(*VICTIM.chunks[:1], (VICTIM.chunks[1][0], 2)),
            finish_reason="stop",
            spec=Spec(drafts=1, draft_tokens=3, accepted_tokens=1, accepted_per_pos=(1, 0, 0)),
        ),
    ),
    ("F01-no-terminal-event", "credited_fault", one(done_seen=False)),
    ("F02-nine-percent", "failures", _many(2, status="failed", error="reset")),
    ("F02-lost", "request_count", _dropped(1)),
    (
        "twice-on-record",
        "request_count",
        replace(
            CLEAN,
            requests=tuple(
                r.model_copy(update={"request_id": "same"})
                if r.cell_id == CELL.id and r.block < 2 and r.prompt_index == 0
                else r
                for r in CLEAN.requests
            ),
        ),
    ),
    ("retried", "retried", _retried()),
    ("sent-before-schedule", "time_order", one(scheduled_ns=VICTIM.sent_ns + 1)),
    ("event-before-send", "time_order", one(sent_ns=VICTIM.chunks[0][0] + 1)),
    (
        "L17-backwards",
        "time_order",
        one(chunks=(VICTIM.chunks[1], VICTIM.chunks[0], *VICTIM.chunks[2:])),
    ),
    ("done-before-end", "time_order", one(done_ns=VICTIM.chunks[-1][0] - 1)),
    (
        "F08-zero-time",
        "time_order",
        one(chunks=tuple((VICTIM.chunks[0][0], n) for _, n in VICTIM.chunks)),
    ),
    (
        "in-flight",
        "in_flight",
        one(scheduled_ns=VICTIM.sent_ns - 200 * MS, sent_ns=VICTIM.sent_ns - 200 * MS),
    ),
    (
        "L15-unit-fault",
        "out_of_range",
        edit(
            CLEAN,
            lambda r: r.cell_id == CELL.id,
            chunks=tuple((VICTIM.chunks[0][0] + i, n) for i, (_, n) in enumerate(VICTIM.chunks)),
        ),
    ),
    (
        "S04-more-accepted",
        "draft_identity",
        one(spec=SPEC.model_copy(update={"accepted_tokens": SPEC.draft_tokens + 1})),
    ),
    ("S05-acceptance-unknown", "acceptance_unknown", one(spec=None)),
    (
        "S05-nothing-accepted",
        "acceptance_low",
        edit(
            CLEAN,
            lambda r: r.cell_id == CELL.id,
            spec=Spec(drafts=31, draft_tokens=93, accepted_tokens=0, accepted_per_pos=(0, 0, 0)),
        ),
    ),
    (
        "drafts-in-a-plain-cell",
        "draft_identity",
        edit(CLEAN, lambda r: r.cell_id == PLAIN.id, spec=SPEC),
    ),
    ("F05-wrong-port", "wrong_server", servers(told("nonce", "somebody else's"))),
    ("settings-unread", "settings_unread", servers(lambda s: {"settings": None})),
    ("settings-unread-after", "settings_unread", servers(lambda s: {"settings_after": None})),
    (
        "restarted",
        "server_changed",
        servers(lambda s: {"settings_after": {**(s.settings or {}), "graph_mode": "eager"}}),
    ),
    ("W10-sampler-defaults", "settings_differ", servers(told("sampler_defaults", {"top_k": 50}))),
    ("threads", "settings_differ", servers(told("threads", 16))),
    ("dtype", "settings_differ", servers(told("dtype", "bfloat16"))),
    ("weights-digest", "settings_differ", servers(told("model_digest", "0" * 64))),
    ("class", "class_mismatch", servers(told("weights", "random:1"))),
    ("fallback", "kernel_fallback", servers(told("kernel_fallbacks", ["conv"]))),
    ("C04-warm-up-repeats", "warm_prompt", _warm()),
    (
        "C01-prefix-cache",
        "warm_prefix",
        servers(
            lambda s: {
                "counters_before": {"vk:prefix_cache_hits_total": 5.0},
                "counters_after": {"vk:prefix_cache_hits_total": 6.0},
            }
        ),
    ),
    (
        "W07-repeats",
        "repeated_prompt",
        edit(CLEAN, lambda r: r.cell_id == CELL.id, prompt_digest="a" * 64, seed=1),
    ),
    ("few-blocks", "few_blocks", _small(2, 6)),
    ("S08-few-requests", "few_requests", _small(3, 3)),
    (
        "missing-block",
        "missing_block",
        replace(CLEAN, requests=tuple(r for r in CLEAN.requests if r.block != 2)),
    ),
    ("torn", "torn_journal", replace(CLEAN, torn=("requests.jsonl.zst",))),
]


@pytest.mark.parametrize(
    ("rule", "records"), [r[1:] for r in REJECTED], ids=[r[0] for r in REJECTED]
)
def test_a_planted_fault_is_named(rule: str, records: RunRecords) -> None:
    broken = [v for v in found(records) if v.rule == rule]
    assert broken, rules(records)
    assert all(v.severity == RULES[rule].severity and v.message for v in broken)


ACCEPTED: list[tuple[str, str, RunRecords]] = [
    ("T20-text-recount-of-whitespace", "token_source_mismatch", one(text="\n" * 3)),
    ("text-at-the-bound", "token_source_mismatch", one(text="x" * 32 * 128)),
    ("usage-absent", "token_source_mismatch", one(usage=None)),
    (
        "hits-of-others",
        "warm_prefix",
        servers(
            lambda s: {
                "counters_before": {"vk:prefix_cache_hits_total": 5.0},
                "counters_after": {"vk:prefix_cache_hits_total": 5.0},
            }
        ),
    ),
    (
        "queries-are-no-hits",
        "warm_prefix",
        servers(
            lambda s: {
                "counters_before": {},
                "counters_after": {"vk:prefix_cache_queries_total": 5.0},
            }
        ),
    ),
    (
        "volatile-setting",
        "server_changed",
        servers(lambda s: {"settings_after": {**(s.settings or {}), "host_launch_us": 99.0}}),
    ),
    (
        "same-in-all-arms",
        "settings_differ",
        replace(
            CLEAN, servers=tuple(s.model_copy(update=told("threads", 8)(s)) for s in CLEAN.servers)
        ),
    ),
    ("three-blocks", "few_blocks", _small(3, 4)),
    ("twelve-requests", "few_requests", _small(3, 4)),
    ("scoring-server", "wrong_server", servers(lambda s: {"purpose": "score", "settings": None})),
    ("slow-to-connect", "time_order", one(connect_ns=7 * MS)),  # a length, not a time
]


@pytest.mark.parametrize(
    ("rule", "records"), [r[1:] for r in ACCEPTED], ids=[r[0] for r in ACCEPTED]
)
def test_what_a_rule_must_not_refuse(rule: str, records: RunRecords) -> None:
    assert rule not in rules(records)


def test_t22_a_rate_beyond_the_memory_bandwidth_is_implausible() -> None:
    for bandwidth, refused in ((4e9, True), (400e9, False)):
        run = a_run(
            provenance=provenance(
                memory_bandwidth_bytes_s=bandwidth, memory_bandwidth_source="declared"
            )
        )
        broken = [v for v in found(make_records(run)) if v.rule == "implausible"]
        assert bool(broken) is refused
        for violation in broken:
            assert violation.numbers["share"] == pytest.approx(
                compute(make_records(run)).cell(violation.cell_id or "").bandwidth_share
            )


def test_t06_a_mismatch_in_one_percent_of_requests_is_enough() -> None:
    run = a_run(scenario(workload={"requests": 100}, measure={"blocks": 1}))
    records = make_records(run)
    victim = next(r for r in records.requests if r.cell_id == CELL.id or r.arm == "vk")
    broken = edit(
        records, lambda r: r is victim, usage=Usage(prompt=victim.prompt_tokens, completion=31)
    )
    mismatches = [v for v in found(broken) if v.rule == "token_source_mismatch"]
    assert len(mismatches) == 1
    assert mismatches[0].severity == "invalid"
    assert mismatches[0].numbers == {"tokens": 32, "usage": 31}


def test_one_percent_of_failures_is_borne_and_more_is_not() -> None:
    run = a_run(scenario(workload={"requests": 100}, measure={"blocks": 1}))
    records = make_records(run)
    cell = cell_of(records, "vk", "mtp3")
    for count, refused in ((1, False), (2, True)):
        ids = [r.request_id for r in records.requests if r.cell_id == cell.id][:count]
        broken = edit(records, lambda r, ids=ids: r.request_id in ids, status="failed", error="x")
        violations = [v for v in found(broken) if v.rule == "failures"]
        assert bool(violations) is refused
        if refused:
            assert violations[0].numbers == {"failed": 2, "scheduled": 100, "bound": 0.01}


def test_without_ignore_eos_an_early_stop_is_fine_but_a_false_length_is_not() -> None:
    run = a_run(scenario(workload={"requests": 4, "ignore_eos": False}))
    records = make_records(run)
    cell = cell_of(records, "vk", "none")
    victim = next(r for r in records.requests if r.cell_id == cell.id)
    short: dict[str, Any] = {
        "token_ids": victim.token_ids[:5],
        "chunks": victim.chunks[:5],
        "usage": Usage(prompt=512, completion=5),
    }
    stopped = edit(records, lambda r: r is victim, finish_reason="stop", **short)
    assert rules(stopped) == set()
    lied = edit(records, lambda r: r is victim, finish_reason="length", **short)
    assert rules(lied) == {"finish_reason"}
    longer = edit(records, lambda r: r is victim, token_ids=(*victim.token_ids, 1))
    assert "output_length" in rules(longer)


def test_edited_rates_break_their_identity() -> None:
    table = compute(CLEAN)
    row = table.cell(CELL.id)
    faster = row.rates["decode_tok_s"].model_copy(update={"value": 601.0})
    edited = row.model_copy(update={"rates": {**row.rates, "decode_tok_s": faster}})
    cells = tuple(edited if c.id == row.id else c for c in table.cells)
    broken = check(CLEAN, table.model_copy(update={"cells": cells}))
    assert [v.rule for v in broken] == ["rate_identity"]
    assert broken[0].numbers["tokens"] == faster.tokens


def test_t01_a_peak_below_the_mean_is_named() -> None:
    table = compute(CLEAN)
    row = table.cell(CELL.id)
    for peak, refused in ((row.e2e_tok_s, False), ((row.e2e_tok_s or 0) * 0.99, True)):
        edited = row.model_copy(update={"peak_tok_s": peak})
        cells = tuple(edited if c.id == row.id else c for c in table.cells)
        broken = check(CLEAN, table.model_copy(update={"cells": cells}))
        assert [v.rule for v in broken] == (["peak_below_mean"] if refused else [])


def test_random_weights_must_be_declared_and_served() -> None:
    run = a_run(classes=Classes(weights="random", acceptance="measured"))
    assert rules(make_records(run)) == {"class_mismatch"}
    served = replace(
        make_records(run),
        servers=tuple(
            s.model_copy(update=told("weights", "random:1")(s)) for s in make_records(run).servers
        ),
    )
    assert rules(served) == set()


GOOD = Spec(drafts=10, draft_tokens=30, accepted_tokens=18, accepted_per_pos=(9, 6, 3))


@pytest.mark.parametrize("tokens", [26, 27, 29])
def test_draft_identities_accept_a_true_record(tokens: int) -> None:
    """10 rounds that accepted 18 give 28 tokens after the first; the last may be cut by 3."""
    assert list(spec_faults(CELL, GOOD, tokens)) == []


@pytest.mark.parametrize(
    ("updates", "tokens", "words"),
    [
        ({"accepted_tokens": 31}, 29, "31 accepted of 30 proposed"),
        ({"accepted_tokens": -1}, 29, "-1 accepted of 30"),
        ({"draft_tokens": 31}, 29, "31 proposed in 10 rounds of up to 3"),
        ({"draft_tokens": 9, "accepted_tokens": 9, "accepted_per_pos": (9,)}, 20, "9 proposed"),
        ({"accepted_per_pos": (9, 6, 2)}, 29, "positions add up to 17, accepted are 18"),
        ({"accepted_per_pos": ()}, 29, "positions add up to 0"),
        ({"accepted_per_pos": (11, 4, 3)}, 29, "must not rise"),
        ({"accepted_per_pos": (9, 3, 6)}, 29, "must not rise"),
        ({"accepted_per_pos": (9, 5, 3, 1)}, 29, "4 positions where k is 3"),
        ({}, 25, "give at least 26"),
        ({}, 30, "give at most 29"),
    ],
)
def test_draft_identities_refuse_a_false_one(
    updates: dict[str, Any], tokens: int, words: str
) -> None:
    faults = [text for text, _ in spec_faults(CELL, GOOD.model_copy(update=updates), tokens)]
    assert any(words in text for text in faults), faults


def test_rounds_without_a_proposal_are_allowed_for_prompt_lookup_only() -> None:
    ngram = CELL.model_copy(update={"draft": CELL.draft.model_copy(update={"method": "ngram"})})
    assert list(spec_faults(ngram, GOOD, 60)) == []
    auto = CELL.model_copy(update={"draft": CELL.draft.model_copy(update={"k": "auto"})})
    assert list(spec_faults(auto, GOOD, 60)) == []
    wide = Spec(drafts=10, draft_tokens=80, accepted_tokens=0, accepted_per_pos=())
    assert list(spec_faults(auto, wide, 11)) == []
    wider = wide.model_copy(update={"draft_tokens": 81})
    assert list(spec_faults(auto, wider, 11))
    idle = Spec(drafts=0, draft_tokens=0, accepted_tokens=0)
    assert list(spec_faults(PLAIN, idle, 32)) == []
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert list(spec_faults(PLAIN, idle.model_copy(update={name: 1}), 32))


@settings(max_examples=80, deadline=None)
@given(accepted=st.lists(st.integers(0, 3), min_size=1, max_size=40), cut=st.integers(0, 3))
def test_draft_identities_hold_for_any_true_course(accepted: list[int], cut: int) -> None:
    spec = Spec(
        drafts=len(accepted),
        draft_tokens=3 * len(accepted),
        accepted_tokens=sum(accepted),
        accepted_per_pos=tuple(sum(a > i for a in accepted) for i in range(3)),
    )
    made = 1 + len(accepted) + sum(accepted)
    assert list(spec_faults(CELL, spec, made - min(cut, accepted[-1]))) == []


def a_ceiling(**updates: Any) -> ClientCeiling:
    known = {
        "streams": 1,
        "tokens_per_chunk": 1,
        "chunks_per_s": 600.0,
        "added_p50_ms": 0.1,
        "added_p99_ms": 10.0,
    }
    return ClientCeiling(**{**known, **updates})


@pytest.mark.parametrize(
    ("ceiling", "expected"),
    [
        # The fastest cells send a chunk each 5 ms: 200 chunks/s, so 600 is just enough.
        (a_ceiling(chunks_per_s=650.0), set()),
        (a_ceiling(chunks_per_s=550.0), {"client_bound"}),
        (a_ceiling(chunks_per_s=650.0, added_p99_ms=10.1), {"client_late"}),
        (a_ceiling(chunks_per_s=650.0, added_p99_ms=None), set()),
        (a_ceiling(chunks_per_s=None, reason="no toy"), {"client_unmeasured"}),
        (a_ceiling(streams=2), {"client_unmeasured"}),
    ],
)
def test_l03_l04_a_throttled_client_is_named(ceiling: ClientCeiling, expected: set[str]) -> None:
    assert rules(make_records(a_run(client_ceilings=(ceiling,)))) == expected


def test_the_clients_own_bounds_are_the_rules() -> None:
    from finalbench.client import ceiling
    from finalbench.validity import machine

    assert machine.CLIENT_HEADROOM == ceiling.HEADROOM
    assert machine.MAX_CLIENT_LATE_MS == ceiling.MAX_ADDED_MS


def test_chunk_rate_counts_every_stream() -> None:
    from finalbench.validity.machine import chunks_per_s

    one = a_request(PLAIN, step_ms=20.0)
    assert chunks_per_s(PLAIN, [one, one]) == pytest.approx(50.0)
    four = PLAIN.model_copy(update={"concurrency": 4})
    assert chunks_per_s(four, [one]) == pytest.approx(200.0)
    assert chunks_per_s(PLAIN, [a_request(PLAIN, sizes=[32])]) is None
    assert chunks_per_s(PLAIN, []) is None


GPU = {"device": "cuda:0", "device_name": "NVIDIA H200"}


def on_gpu(
    clock: Callable[[str, int], float], *, per_request: int = 4, base: RunRecords = CLEAN
) -> RunRecords:
    """A clean run on a GPU, its clock sampled inside each request; by arm and sample number."""
    changed = tuple(
        s.model_copy(
            update={
                name: {**(getattr(s, name) or {}), **GPU} for name in ("settings", "settings_after")
            }
        )
        for s in base.servers
    )
    samples, counts = [], {"vk": 0, "stock": 0}
    for r in sorted(base.requests, key=lambda r: r.sent_ns):
        for part in range(per_request):
            at = r.sent_ns + (r.chunks[-1][0] - r.sent_ns) * part // 4
            values = {"gpu_sm_clock_mhz": clock(r.arm, counts[r.arm]), "gpu_power_w": 400.0}
            samples.append(TelemetryRecord(utc="2026-11-30T22:00:00Z", t_ns=at, values=values))
            counts[r.arm] += 1
    return replace(base, servers=changed, telemetry=tuple(samples))


def test_l18_clocks_of_compared_arms_must_agree() -> None:
    assert rules(on_gpu(lambda arm, i: 1_980.0)) == set()
    offset = on_gpu(lambda arm, i: 1_980.0 if arm == "vk" else 1_980.0 / 1.03)
    broken = [v for v in found(offset) if v.rule == "clock_confounded"]
    assert len(broken) == 1
    assert broken[0].numbers["high_mhz"] == 1_980.0
    assert rules(on_gpu(lambda arm, i: 1_980.0 if arm == "vk" else 1_980.0 / 1.0099)) == set()


def test_l18_a_clock_that_moves_within_an_arm_is_unsteady() -> None:
    moving = on_gpu(lambda arm, i: 1_980.0 - (110.0 if arm == "vk" and i % 2 else 0.0))
    assert [v.message for v in found(moving) if v.rule == "clock_unsteady"] == [
        "the GPU clock moved by 5.7% while vk was busy"
    ]
    assert "clock_unsteady" not in rules(on_gpu(lambda arm, i: 1_980.0 - 90.0 * (i % 2)))


def test_l18_only_samples_inside_the_requests_count() -> None:
    steady = on_gpu(lambda arm, i: 1_980.0)
    spike = TelemetryRecord(utc="", t_ns=5, values={"gpu_sm_clock_mhz": 3_000.0})
    assert rules(replace(steady, telemetry=(spike, *steady.telemetry))) == set()
    few = [
        v for v in found(replace(steady, telemetry=(spike,) * 50)) if v.rule == "clock_unobserved"
    ]
    assert [v.numbers["samples"] for v in few] == [0, 0]
    none = replace(steady, telemetry=())
    assert rules(none) == {"clock_unobserved"}
    silent = tuple(
        t.model_copy(update={"values": {"gpu_sm_clock_mhz": None}}) for t in steady.telemetry
    )
    assert rules(replace(steady, telemetry=silent)) == {"clock_unobserved"}


def test_clock_samples_have_a_floor() -> None:
    steady = on_gpu(lambda arm, i: 1_980.0)
    for count, refused in ((29, True), (30, False)):
        stock = [r for r in steady.requests if r.arm == "stock"]
        kept: list[TelemetryRecord] = []
        for t in steady.telemetry:
            inside = any(r.sent_ns <= t.t_ns <= r.chunks[-1][0] for r in stock)
            if not inside or len([k for k in kept if k.values.get("stock")]) < count:
                kept.append(t.model_copy(update={"values": t.values | {"stock": float(inside)}}))
        fewer = replace(steady, telemetry=tuple(kept))
        assert ("clock_unobserved" in rules(fewer)) is refused
    samples = [TelemetryRecord(utc="", t_ns=t, values={}) for t in (20, 0, 10, 21)]
    request = a_request(
        PLAIN, sizes=[1, 1], start_ns=10, scheduled_ns=10, chunks=((15, 1), (20, 1))
    )

    def times(requests: list[RequestRecord]) -> list[int]:
        return [s.t_ns for s in busy_samples(requests, samples)]

    assert times([request]) == [10, 20]
    assert times([request, request]) == [10, 20]
    assert times([request.model_copy(update={"warmup": True})]) == []


def sensed(
    name: str, value: Callable[[str, int], float | None], base: RunRecords = CLEAN
) -> RunRecords:
    """A clean run on a GPU at one clock, with another sensor beside it."""
    steady, counts = on_gpu(lambda arm, i: 1_980.0, base=base), {"vk": 0, "stock": 0}
    changed = []
    for sample in steady.telemetry:
        arm = next(r.arm for r in base.requests if r.sent_ns <= sample.t_ns <= r.chunks[-1][0])
        values = sample.values | {name: value(arm, counts[arm])}
        counts[arm] += 1
        changed.append(sample.model_copy(update={"values": values}))
    return replace(steady, telemetry=tuple(changed))


# Cells long enough for a sensor that looks back: some 4 s of vk with drafts, 13 s of stock.
SLOW = make_records(step_ms={"vk": 60.0, "stock": 100.0})


def test_l18_an_idle_window_is_named() -> None:
    share = {"vk": 0.9, "stock": 0.45}
    (idle,) = found(sensed("gpu_busy_share", lambda arm, i: share[arm], SLOW))
    assert (idle.rule, idle.severity) == ("gpu_idle", "warning")
    assert idle.numbers == {"busy": pytest.approx(0.45), "bound": 0.5}
    assert "45% of the time that stock was measured" in idle.message
    # Half is enough; a card without the sensor breaks no rule.
    assert rules(sensed("gpu_busy_share", lambda arm, i: 0.5, SLOW)) == set()
    assert rules(sensed("gpu_busy_share", lambda arm, i: None, SLOW)) == set()
    # In cells of a second every reading is of what was before: nothing can be said.
    quick = make_records(step_ms={"vk": 5.0, "stock": 5.0})
    assert rules(sensed("gpu_busy_share", lambda arm, i: 0.0, quick)) == set()


def test_l18_a_busy_share_counts_where_all_it_looks_back_at_was_measured() -> None:
    first = a_request(PLAIN, sizes=[1, 1], chunks=((2 * 10**9, 1), (3 * 10**9, 1)), start_ns=10**9)
    last = first.model_copy(update={"sent_ns": 4 * 10**9, "chunks": ((5 * 10**9, 1),)})

    def read(requests: list[RequestRecord], *samples: tuple[float, float]) -> Any:
        told = [
            TelemetryRecord(utc="", t_ns=round(at * 1e9), values={"gpu_busy_share": share})
            for at, share in samples
        ]
        return busy_share(requests, told)

    # The cell lasts from 1 s to 5 s, the pause between its requests included; 2 s are looked back.
    both = [first, last]
    assert read(both, (2.999, 0.0), (3.0, 0.4), (3.5, 0.6), (5.0, 0.8), (5.001, 0.0)) == (
        pytest.approx(0.6),
        None,
    )
    value, reason = read(both, (2.9, 0.3), (5.1, 0.3))
    assert value is None
    assert reason == (
        "no reading looks back at measured time alone: each tells of up to 2 s, the longest cell "
        "took 4.0 s"
    )
    assert read(both) == (None, "the share of busy time was not read")
    assert read([], (3.0, 0.5)) == (None, "no request was measured")
    # Apart they are two cells, or another attempt, or none at all.
    for updates in ({"cell_id": "x"}, {"server_id": "x"}, {"roll": 1}, {"warmup": True}):
        assert read([first, last.model_copy(update=updates)], (3.5, 0.5))[0] is None
    assert read([last, first.model_copy(update={"chunks": ()})], (4.9, 0.5))[0] is None


@pytest.mark.parametrize(
    ("reason", "named"),
    [
        (0x0, False),
        (0x1, False),
        (0x4, False),
        (0x8, True),
        (0x10, False),
        (0x20, True),
        (0x40, True),
        (0x44, True),
        (0x80, True),
    ],
)
def test_heat_is_named_and_a_power_cap_is_not(reason: int, named: bool) -> None:
    broken = found(sensed("gpu_clock_reasons", lambda arm, i: reason if i == 3 else 1.0))
    assert [v.rule for v in broken] == (["gpu_throttled"] * 2 if named else [])
    if named:
        assert broken[0].numbers["samples"] == 1


def test_a_second_process_on_the_gpu_is_named() -> None:
    assert rules(sensed("gpu_processes", lambda arm, i: 1.0)) == set()
    (shared,) = found(sensed("gpu_processes", lambda arm, i: 2.0 if arm == "vk" and not i else 1.0))
    assert (shared.rule, shared.numbers["processes"]) == ("gpu_shared", 2.0)


def test_why_no_gpu_was_read_is_told() -> None:
    steady = on_gpu(lambda arm, i: 1_980.0)
    early = TelemetryRecord(utc="", t_ns=1, values={})
    silent = TelemetryRecord(utc="", t_ns=2, values={}, gpu_reason="NVML: no permission")
    (first, _) = found(replace(steady, telemetry=(early, silent)))
    assert first.message.endswith("30 are needed (NVML: no permission)")
    (first, _) = found(replace(steady, telemetry=(early,)))
    assert first.message.endswith("30 are needed")


def warmed(*times_ms: float, rounds: int | None = 12, status: str = "ok") -> RunRecords:
    """The clean run with warm-ups of its base cell by rule: these on the first server, steady ones
    on the others."""
    workload = CLEAN.run.scenario.workload.model_copy(update={"warmup_rounds": rounds})
    spec = CLEAN.run.scenario.model_copy(update={"workload": workload})
    starts: dict[tuple[str, int], int] = {}
    for r in CLEAN.requests:
        if r.cell_id == CELL.id and not r.warmup:
            starts.setdefault((r.server_id, r.block), r.sent_ns)
    warm = [
        a_request(
            CELL,
            block=block,
            index=index,
            ttft_ms=ms,
            warmup=True,
            server_id=server_id,
            start_ns=start - (20 - index) * 10**9,
            status=status if block == 0 and index == 1 else "ok",
        )
        for (server_id, block), start in starts.items()
        for index, ms in enumerate(times_ms if block == 0 else (50.0, 50.0, 50.0))
    ]
    records = replace(CLEAN, run=CLEAN.run.model_copy(update={"scenario": spec}))
    # Out of order, as a journal of many streams is.
    return replace(records, requests=(*reversed(warm), *CLEAN.requests))


def unsteady_of(records: RunRecords) -> list[Violation]:
    return [v for v in found(records) if v.rule == "warm_up_unsteady" and v.cell_id == CELL.id]


def test_c09_a_warm_up_by_rule_must_have_ended_steady() -> None:
    steady = warmed(400.0, 200.0, 100.0, 101.0, 99.0)
    assert unsteady_of(steady) == []
    assert "warm_prompt" not in rules(steady)
    (broken,) = unsteady_of(warmed(400.0, 200.0, 100.0))
    assert (broken.severity, broken.block) == ("warning", 0)
    assert broken.numbers == {"rounds": 3, "most": 12}
    assert "first token still varies from 100.00 to 400.00 ms" in broken.message
    (short,) = unsteady_of(warmed(100.0, 100.0))
    assert "2 of the 3 rounds" in short.message
    (failed,) = unsteady_of(warmed(100.0, 100.0, 100.0, status="failed"))
    assert failed.numbers["rounds"] == 1
    # Without the rule, a fixed number of warm-ups is what was asked for.
    assert unsteady_of(warmed(400.0, 200.0, 100.0, rounds=None)) == []


def test_servers_are_judged_by_what_they_measured() -> None:
    steady = warmed(100.0, 100.0, 100.0)
    # A server that measured without a warm-up is named; one that only warmed up is not.
    late = {r.server_id for r in steady.requests if r.warmup and r.block == 1}
    cold = tuple(r for r in steady.requests if not (r.warmup and r.server_id in late))
    (broken,) = unsteady_of(replace(steady, requests=cold))
    assert (broken.block, broken.numbers["rounds"]) == (1, 0)
    lone = [
        a_request(CELL, index=i, warmup=True, server_id="died", ttft_ms=ms, start_ns=10**9 * i)
        for i, ms in enumerate((900.0, 50.0), 1)
    ]
    assert unsteady_of(replace(steady, requests=(*lone, *steady.requests))) == []


def test_a_request_cut_before_its_end_has_no_end_to_order() -> None:
    assert "time_order" not in rules(one(done_ns=None))


def test_rounds_of_many_streams_are_judged_by_their_medians() -> None:
    from finalbench.validity.warmup import rounds

    times = [10.0, 30.0, 20.0, 90.0, 15.0, 25.0, 50.0]
    made = [
        a_request(CELL, index=i, start_ns=10**9 * (i + 1), ttft_ms=ms, sizes=[1, 1, 1], step_ms=5.0)
        for i, ms in enumerate(times)
    ]
    firsts, pers = rounds(made, 3)
    assert firsts == [20.0, 25.0]  # the seventh request is no whole round
    assert pers == pytest.approx([5.0, 5.0])
    single = [a_request(CELL, index=i, start_ns=10**9 * i, sizes=[1]) for i in (1, 2)]
    assert rounds(single, 1) == ([50.0, 50.0], [0.0, 0.0])


def counted(**change: float) -> RunRecords:
    """Servers whose counters account for every request, but for the given differences."""
    changed = []
    for server in CLEAN.servers:
        own = [r for r in CLEAN.requests if r.server_id == server.server_id]
        after = {
            "generation_tokens": 7.0 + sum(len(r.token_ids) for r in own),
            "spec_decode_num_drafts": 3.0 + sum(r.spec.drafts for r in own if r.spec),
            "spec_decode_num_accepted_tokens": sum(r.spec.accepted_tokens for r in own if r.spec),
        }
        for name, value in change.items():
            after[name] += value
        before = {"generation_tokens": 7.0, "spec_decode_num_drafts": 3.0}
        changed.append(
            server.model_copy(update={"counters_before": before, "counters_after": after})
        )
    return replace(CLEAN, servers=tuple(changed))


def test_t24_totals_are_the_engines_own() -> None:
    assert rules(counted()) == set()
    for name, by in (
        ("generation_tokens", -1),
        ("generation_tokens", 1),
        ("spec_decode_num_drafts", 1),
        ("spec_decode_num_accepted_tokens", -1),
    ):
        broken = [v for v in found(counted(**{name: by})) if v.rule == "engine_count"]
        assert len(broken) == len(CLEAN.servers)
        assert broken[0].severity == "invalid"
        assert name in broken[0].message
        assert broken[0].numbers["counted"] == (broken[0].numbers["received"] or 0) + by  # ty: ignore[unsupported-operator]


def test_t24_scores_and_failures_explain_more_tokens() -> None:
    more = counted(generation_tokens=2)
    scorers = tuple(
        s.model_copy(update={"scorer_server_id": server.server_id, "request_id": f"{i}"})
        for server in more.servers
        for i, s in enumerate(CLEAN.scores[:2])
    )
    explained = replace(more, scores=scorers)
    assert "engine_count" not in rules(explained)
    assert "engine_count" in rules(replace(counted(generation_tokens=3), scores=scorers))
    failed = edit(more, lambda r: r.prompt_index == 1, status="failed", error="cut")
    assert "engine_count" not in rules(failed)
    fewer = edit(counted(generation_tokens=-1), lambda r: r.prompt_index == 1, status="failed")
    assert "engine_count" in rules(fewer)
    unread = tuple(s.model_copy(update={"counters_after": None}) for s in more.servers)
    assert "engine_count" not in rules(replace(more, servers=unread))


@pytest.mark.parametrize(("slow", "refused"), [(1.3, True), (1.25, True), (1.15, False)])
def test_c07_c09_a_cold_first_request_is_named(slow: float, refused: bool) -> None:
    requests = tuple(
        a_request(
            PLAIN,
            block=block,
            index=i,
            start_ns=(1 + i) * 10_000 * MS,
            step_ms=20.0 * (slow if i == 0 else 1.0),
        )
        for block in range(4)
        for i in range(4)
    )
    others = tuple(r for r in CLEAN.requests if r.cell_id != PLAIN.id)
    broken = [
        v for v in found(replace(CLEAN, requests=others + requests)) if v.rule == "cold_start"
    ]
    assert bool(broken) is refused
    if refused:
        assert broken[0].cell_id == PLAIN.id
        assert broken[0].numbers["ratio"] == pytest.approx(slow)


def test_warmth_needs_three_requests() -> None:
    from finalbench.validity.samples import check_warmth

    cold = [
        a_request(PLAIN, index=i, start_ns=(1 + i) * 10_000 * MS, step_ms=40.0 if i == 0 else 20.0)
        for i in range(3)
    ]
    assert [v.rule for v in check_warmth(PLAIN, cold)] == ["cold_start"]
    assert list(check_warmth(PLAIN, cold[:2])) == []
    lone = [r.model_copy(update={"server_id": f"s{i}"}) for i, r in enumerate(cold)]
    assert list(check_warmth(PLAIN, lone)) == []
    silent = cold[0].model_copy(update={"chunks": cold[0].chunks[:1]})
    assert list(check_warmth(PLAIN, [silent, *cold[1:]])) == []


def random_moe(routing: object) -> RunRecords:
    facts = {**SCENARIO["model"]["facts"], "experts": 256, "experts_per_token": 8}
    spec = scenario(model={**SCENARIO["model"], "facts": facts})
    run = a_run(spec, classes=Classes(weights="random", acceptance="measured"))
    records = make_records(run)
    told_all = {"weights": "random:1", "routing": routing}
    return replace(
        records,
        servers=tuple(
            s.model_copy(
                update={
                    name: {**(getattr(s, name) or {}), **told_all}
                    for name in ("settings", "settings_after")
                }
            )
            for s in records.servers
        ),
    )


def test_random_weights_must_route_as_if_independent() -> None:
    from finalbench.validity.routing import expected_distinct

    assert [round(expected_distinct(256, 8, m), 1) for m in (1, 2, 3, 4)] == [8.0, 15.8, 23.3, 30.5]
    good = random_moe({"distinct_experts": [8.0, 15.7, 23.0, 29.7]})
    assert rules(good) == set()
    collapsed = random_moe({"distinct_experts": [8.0, 12.0, 15.0, 18.0]})
    broken = [v for v in found(collapsed) if v.rule == "correlated_routing"]
    assert [v.numbers["rows"] for v in broken] == [2, 3, 4] * 8  # two arms, four blocks
    assert broken[-1].numbers["expected"] == pytest.approx(30.53, abs=0.01)
    assert rules(random_moe(None)) == {"correlated_routing"}
    assert rules(random_moe({})) == {"correlated_routing"}


def test_routing_of_real_or_dense_models_is_their_own() -> None:
    facts = {**SCENARIO["model"]["facts"], "experts": 256, "experts_per_token": 8}
    real = make_records(a_run(scenario(model={**SCENARIO["model"], "facts": facts})))
    assert rules(real) == set()


def numbers(records: RunRecords, rule: str) -> dict[str, Any]:
    return next(v.numbers for v in found(records) if v.rule == rule)


def message(records: RunRecords, rule: str) -> str:
    return next(v.message for v in found(records) if v.rule == rule)


def test_breaches_state_their_numbers() -> None:
    first, second = VICTIM.chunks[0][0], VICTIM.chunks[1][0]
    swapped = one(chunks=(VICTIM.chunks[1], VICTIM.chunks[0], *VICTIM.chunks[2:]))
    assert numbers(swapped, "time_order") == {"before_ns": second, "after_ns": first}
    name = f"request {VICTIM.request_id}: "
    gap = second - first
    assert message(swapped, "time_order") == f"{name}chunk 1 is {gap} ns before chunk 0"
    late = one(scheduled_ns=VICTIM.sent_ns + 7)
    assert message(late, "time_order") == f"{name}sent is 7 ns before scheduled"
    early = one(done_ns=VICTIM.chunks[-1][0] - 5)
    last = len(VICTIM.chunks) - 1
    assert message(early, "time_order") == f"{name}done is 5 ns before chunk {last}"
    still = one(chunks=tuple((first, n) for _, n in VICTIM.chunks))
    assert numbers(still, "time_order") == {"events": last + 1, "span_ns": 0}
    overlapping = one(scheduled_ns=VICTIM.sent_ns - 200 * MS, sent_ns=VICTIM.sent_ns - 200 * MS)
    assert numbers(overlapping, "in_flight") == {"in_flight": 2, "concurrency": 1}
    assert numbers(_dropped(1), "request_count") == {"recorded": 3, "scheduled": 4}
    assert numbers(_small(2, 6), "few_blocks") == {"blocks": 2}
    assert numbers(_small(3, 3), "few_requests") == {"requests": 9}
    lost = _many(2, status="failed", error="reset by peer")
    assert message(lost, "failures") == "2 of 16 requests failed; the first: failed: reset by peer"
    twice = replace(
        CLEAN,
        requests=tuple(
            r.model_copy(update={"request_id": "same"})
            if r.cell_id == CELL.id and r.block < 2 and r.prompt_index == 0
            else r
            for r in CLEAN.requests
        ),
    )
    assert numbers(twice, "request_count") == {"recorded": 2, "scheduled": 1}


def test_a_single_event_or_an_invalid_request_may_take_no_time() -> None:
    from finalbench.validity.clocks import check_clocks

    at = 1_050 * MS
    row = compute(CLEAN).cell(PLAIN.id)
    whole = a_request(PLAIN, sizes=[32])
    failed = a_request(
        PLAIN, sizes=[16, 16], chunks=((at, 16), (at, 16)), status="failed", error="x"
    )
    assert list(check_clocks(PLAIN, row, [whole])) == []
    assert list(check_clocks(PLAIN, row, [failed])) == []
    two = a_request(PLAIN, sizes=[16, 16], chunks=((at, 16), (at, 16)))
    assert [v.rule for v in check_clocks(PLAIN, row, [two])] == ["time_order"]
    later = a_request(PLAIN, sizes=[16, 16], chunks=((at, 16), (at + 1, 16)))
    assert list(check_clocks(PLAIN, row, [later])) == []


def test_streams_that_touch_do_not_overlap() -> None:
    from finalbench.validity.clocks import check_clocks

    row = compute(CLEAN).cell(PLAIN.id)
    one_ = a_request(PLAIN)
    next_ = a_request(PLAIN, index=1, start_ns=one_.chunks[-1][0])
    assert list(check_clocks(PLAIN, row, [one_, next_])) == []
    over = a_request(PLAIN, index=1, start_ns=one_.chunks[-1][0] - 1)
    assert [v.rule for v in check_clocks(PLAIN, row, [one_, over])] == ["in_flight"]
    silent = one_.model_copy(update={"chunks": ()})
    assert list(check_clocks(PLAIN, row, [silent, over])) == []


def test_ten_requests_are_enough() -> None:
    assert "few_requests" not in rules(_small(5, 2))


@pytest.mark.parametrize(("accepted", "low"), [(1, False), (0, True)])
def test_an_acceptance_length_of_1_02_is_the_least(accepted: int, low: bool) -> None:
    spec = Spec(
        drafts=50, draft_tokens=150, accepted_tokens=accepted, accepted_per_pos=(accepted, 0, 0)
    )
    slow = edit(CLEAN, lambda r: r.cell_id == CELL.id, spec=spec)
    assert ("acceptance_low" in rules(slow)) is low


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [
        (Spec(drafts=10, draft_tokens=30, accepted_tokens=30, accepted_per_pos=(10, 10, 10)), 41),
        (Spec(drafts=10, draft_tokens=10, accepted_tokens=0, accepted_per_pos=(0, 0, 0)), 11),
        (Spec(drafts=10, draft_tokens=30, accepted_tokens=0, accepted_per_pos=()), 11),
        (Spec(drafts=10, draft_tokens=30, accepted_tokens=5, accepted_per_pos=(5,)), 16),
        (Spec(drafts=10, draft_tokens=30, accepted_tokens=9, accepted_per_pos=(3, 3, 3)), 20),
    ],
)
def test_draft_identities_at_their_edges(spec: Spec, tokens: int) -> None:
    assert list(spec_faults(CELL, spec, tokens)) == []
    assert list(spec_faults(CELL, spec, tokens + 1))
    assert list(spec_faults(CELL, spec, tokens - 3)) == []
    assert list(spec_faults(CELL, spec, tokens - 4))


def test_the_clients_headroom_is_inclusive() -> None:
    from finalbench.validity.machine import check_client, chunks_per_s

    requests = [a_request(PLAIN)]
    rate = chunks_per_s(PLAIN, requests)
    assert rate is not None
    enough = a_ceiling(chunks_per_s=3.0 * rate)
    assert list(check_client(PLAIN, requests, [enough])) == []
    below = a_ceiling(chunks_per_s=2.999 * rate)
    broken = list(check_client(PLAIN, requests, [below]))
    assert [v.rule for v in broken] == ["client_bound"]
    other = a_ceiling(streams=9, chunks_per_s=1.0)
    assert list(check_client(PLAIN, requests, [other, enough])) == []
    unread = list(check_client(PLAIN, requests, [a_ceiling(chunks_per_s=None, reason="no toy")]))
    assert unread[0].message == "ceiling of the client: no toy"
    unsaid = list(check_client(PLAIN, requests, [a_ceiling(chunks_per_s=None)]))
    assert unsaid[0].message == "ceiling of the client: it was not measured"
    assert list(check_client(PLAIN, [], [])) == []


def test_clock_bounds_are_inclusive() -> None:
    edge = on_gpu(lambda arm, i: 2_000.0 if i % 4 else 1_900.0)
    assert rules(edge) == set()
    past = on_gpu(lambda arm, i: 2_000.0 if i % 4 else 1_899.0)
    assert rules(past) == {"clock_unsteady"}
    assert numbers(past, "clock_unsteady")["spread"] == pytest.approx(0.0505)
    apart = on_gpu(lambda arm, i: 2_000.0 if arm == "vk" else 2_021.0)
    assert numbers(apart, "clock_confounded") == {"low_mhz": 2_000.0, "high_mhz": 2_021.0}


def test_prefix_hits_are_counted_from_nothing_when_unread_before() -> None:
    hit = servers(
        lambda s: {"counters_before": None, "counters_after": {"vk:prefix_cache_hits_total": 2.0}}
    )
    assert numbers(hit, "warm_prefix") == {"hits": 2.0}
    none = servers(
        lambda s: {"counters_before": None, "counters_after": {"vk:prefix_cache_hits_total": 0.0}}
    )
    assert "warm_prefix" not in rules(none)
    unread = servers(
        lambda s: {"counters_before": {"vk:prefix_cache_hits_total": 2.0}, "counters_after": None}
    )
    assert "warm_prefix" not in rules(unread)


@pytest.mark.parametrize(("share", "refused"), [(1.0, False), (1.001, True), (1.9, True)])
def test_the_whole_bandwidth_is_the_limit(share: float, refused: bool) -> None:
    table = compute(CLEAN)
    edited = table.cell(PLAIN.id).model_copy(update={"bandwidth_share": share})
    cells = tuple(edited if c.id == edited.id else c for c in table.cells)
    broken = check(CLEAN, table.model_copy(update={"cells": cells}))
    assert [v.rule for v in broken] == (["implausible"] if refused else [])


def test_only_the_whole_span_counts_as_no_time() -> None:
    from finalbench.validity.clocks import check_clocks

    at = 1_050 * MS
    row = compute(CLEAN).cell(PLAIN.id)
    close = a_request(PLAIN, sizes=[16, 8, 8], chunks=((at, 16), (at, 8), (at + 5, 8)))
    assert list(check_clocks(PLAIN, row, [close])) == []


def test_an_earlier_end_frees_one_place_only() -> None:
    from finalbench.validity.clocks import check_clocks

    row = compute(CLEAN).cell(PLAIN.id)
    alone = a_request(PLAIN)
    start = alone.chunks[-1][0] + MS
    both = [a_request(PLAIN, index=i, start_ns=start + i) for i in (1, 2)]
    assert [v.rule for v in check_clocks(PLAIN, row, [alone, *both])] == ["in_flight"]


@pytest.mark.parametrize(("relative", "refused"), [(1e-8, True), (-1e-8, True), (1e-10, False)])
def test_rate_identity_holds_to_a_billionth(relative: float, refused: bool) -> None:
    table = compute(CLEAN)
    row = table.cell(PLAIN.id)
    rate = row.rates["e2e_tok_s"]
    off = rate.model_copy(update={"value": (rate.value or 0) * (1 + relative)})
    edited = row.model_copy(update={"rates": {**row.rates, "e2e_tok_s": off}})
    cells = tuple(edited if c.id == row.id else c for c in table.cells)
    broken = check(CLEAN, table.model_copy(update={"cells": cells}))
    assert [v.rule for v in broken] == (["rate_identity"] if refused else [])


@pytest.mark.parametrize("parts", [("tokens",), ("seconds",), ("tokens", "seconds")])
def test_a_rate_without_its_parts_breaks_its_identity(parts: tuple[str, ...]) -> None:
    table = compute(CLEAN)
    row = table.cell(PLAIN.id)
    bare = row.rates["e2e_tok_s"].model_copy(update=dict.fromkeys(parts))
    edited = row.model_copy(update={"rates": {**row.rates, "e2e_tok_s": bare}})
    cells = tuple(edited if c.id == row.id else c for c in table.cells)
    broken = check(CLEAN, table.model_copy(update={"cells": cells}))
    assert [v.rule for v in broken] == ["rate_identity"]


def test_the_peak_may_be_below_the_mean_by_rounding_only() -> None:
    table = compute(CLEAN)
    row = table.cell(CELL.id)
    mean = row.e2e_tok_s or 0.0
    edge = row.model_copy(update={"peak_tok_s": mean * (1 - 1e-9)})
    cells = tuple(edge if c.id == row.id else c for c in table.cells)
    assert check(CLEAN, table.model_copy(update={"cells": cells})) == []


def test_t05_more_chunks_than_tokens_by_usage() -> None:
    """No ids: each content chunk holds at least a token, whatever the usage says."""
    bare = tuple((at, 0) for at, _ in VICTIM.chunks)
    for completion, refused in ((len(bare) - 1, True), (len(bare), False)):
        told_ = one(
            token_ids=(),
            chunks=bare,
            token_source="usage",
            first_chunk_tokens=0,
            usage=Usage(prompt=512, completion=completion),
        )
        broken = [v for v in found(told_) if v.rule == "token_source_mismatch"]
        assert bool(broken) is refused
    usage = Usage(prompt=512, completion=len(bare) - 1)
    told_ = one(token_ids=(), chunks=bare, token_source="usage", first_chunk_tokens=0, usage=usage)
    assert numbers(told_, "token_source_mismatch") == {
        "tokens": len(bare) - 1,
        "content_chunks": len(bare),
    }


def test_one_good_request_is_enough_to_miss_its_counters() -> None:
    from finalbench.validity.drafts import check_drafts

    bare = a_request(CELL, spec=None)
    row = compute(CLEAN).cell(CELL.id).model_copy(update={"acceptance_length": None})
    for ok, expected in ((1, ["acceptance_unknown"]), (0, [])):
        counts = row.counts.model_copy(update={"ok": ok})
        edited = row.model_copy(update={"counts": counts})
        assert [v.rule for v in check_drafts(CELL, edited, [bare])] == expected


def test_a_prompt_lookup_may_propose_nothing_in_a_round() -> None:
    ngram = CELL.model_copy(update={"draft": CELL.draft.model_copy(update={"method": "ngram"})})
    auto = CELL.model_copy(update={"draft": CELL.draft.model_copy(update={"k": "auto"})})
    empty = Spec(drafts=5, draft_tokens=0, accepted_tokens=0)
    few = Spec(drafts=5, draft_tokens=2, accepted_tokens=1, accepted_per_pos=(1,))
    for cell in (ngram, auto):
        assert list(spec_faults(cell, empty, 6)) == []
        assert list(spec_faults(cell, few, 7)) == []
    assert list(spec_faults(CELL, few, 7))


def test_t24_counters_start_at_nothing_when_unread_before() -> None:
    whole = counted()
    fresh = tuple(
        s.model_copy(
            update={
                "counters_before": {},
                "counters_after": {
                    name: value - (s.counters_before or {}).get(name, 0.0)
                    for name, value in (s.counters_after or {}).items()
                },
            }
        )
        for s in whole.servers
    )
    assert rules(replace(whole, servers=fresh)) == set()


def test_t24_requests_without_a_count_add_nothing() -> None:
    lost = one(counted(), token_ids=(), usage=None, token_source=None, status="failed", error="x")
    assert "engine_count" not in rules(lost)
    exact = tuple(
        s.model_copy(
            update={
                "counters_after": {
                    **(s.counters_after or {}),
                    "generation_tokens": (s.counters_after or {})["generation_tokens"]
                    - (32 if s.server_id == VICTIM.server_id else 0),
                }
            }
        )
        for s in lost.servers
    )
    assert "engine_count" not in rules(replace(lost, servers=exact))


def test_t24_unread_draft_counters_are_not_summed() -> None:
    assert "engine_count" not in rules(one(counted(), spec=None))


def test_chunk_rate_of_short_and_silent_streams() -> None:
    from finalbench.validity.machine import chunks_per_s

    two = a_request(PLAIN, sizes=[16, 16], step_ms=20.0)
    silent = two.model_copy(update={"chunks": ()})
    single = a_request(PLAIN, sizes=[32])
    assert chunks_per_s(PLAIN, [two, silent, single]) == pytest.approx(50.0)
    assert chunks_per_s(PLAIN, [silent, single]) is None


def test_routing_is_judged_by_measuring_servers_of_each_arm() -> None:
    good, bad = {"distinct_experts": [8.0, 15.7]}, {"distinct_experts": [8.0, 12.0]}
    records = random_moe(good)

    def with_routing(server: ServerRecord, routing: object) -> ServerRecord:
        return server.model_copy(
            update={
                name: {**(getattr(server, name) or {}), "routing": routing}
                for name in ("settings", "settings_after")
            }
        )

    stock = tuple(with_routing(s, bad) if s.arm == "stock" else s for s in records.servers)
    broken = [v for v in found(replace(records, servers=stock)) if v.rule == "correlated_routing"]
    # Every server is a process of its own: each is judged, by name.
    assert [v.message.split(":")[0] for v in broken] == [
        s.server_id for s in stock if s.arm == "stock"
    ]
    assert [v.block for v in broken] == [0, 1, 2, 3]
    last = with_routing(records.servers[-1], bad)
    one_bad = replace(records, servers=(*records.servers[:-1], last))
    assert [v.block for v in found(one_bad)] == [last.block]
    scorer = with_routing(records.servers[0], bad).model_copy(update={"purpose": "score"})
    assert rules(replace(records, servers=(scorer, *records.servers))) == set()
    other = scorer.model_copy(update={"arm": "judge"})
    assert rules(replace(records, servers=(other, *records.servers))) == set()


def test_an_arm_with_the_same_weights_may_speak_for_another_on_routing() -> None:
    records = random_moe({"distinct_experts": [8.0, 15.7]})

    def silent_stock(digest: str) -> RunRecords:
        def changed(server: ServerRecord) -> ServerRecord:
            silent = {"routing": None} if server.arm == "stock" else {}
            mine = digest if server.arm == "stock" else "sha256:one"
            return server.model_copy(
                update={
                    name: {**(getattr(server, name) or {}), **silent, "model_digest": mine}
                    for name in ("settings", "settings_after")
                }
            )

        return replace(records, servers=tuple(changed(s) for s in records.servers))

    assert "correlated_routing" not in rules(silent_stock("sha256:one"))
    assert "correlated_routing" in rules(silent_stock("sha256:two"))


def test_routing_measured_while_serving_is_taken_as_last_told() -> None:
    good, bad = {"distinct_experts": [8.0, 15.7]}, {"distinct_experts": [8.0, 12.0]}

    def told(before: object, after: object) -> set[str]:
        records = random_moe(good)
        servers = tuple(
            s.model_copy(
                update={
                    "settings": {**(s.settings or {}), "routing": before},
                    "settings_after": {**(s.settings_after or {}), "routing": after},
                }
            )
            for s in records.servers
        )
        return rules(replace(records, servers=servers))

    assert told(None, good) == set()
    assert told(bad, good) == set()
    assert told(good, bad) == {"correlated_routing"}
    assert told(good, None) == set()


def test_a_prompt_sent_twice_is_repeated() -> None:
    victim = next(r for r in CLEAN.requests if r.cell_id == CELL.id and r.prompt_index == 2)
    twin = next(
        r
        for r in CLEAN.requests
        if r.cell_id == CELL.id and r.prompt_index == 1 and r.server_id == victim.server_id
    )
    update = {"prompt_digest": twin.prompt_digest, "seed": twin.seed}
    records = edit(CLEAN, lambda r: r is victim, **update)
    assert numbers(records, "repeated_prompt") == {"repeated": 1, "distinct": 15}


def cold_by(*per_token_ms: float) -> list[RequestRecord]:
    return [
        a_request(PLAIN, index=i, start_ns=10**10 * (i + 1), sizes=[1, 1], step_ms=ms)
        for i, ms in enumerate(per_token_ms)
    ]


def test_the_first_request_is_held_against_the_median_of_all_others() -> None:
    (cold,) = check_warmth(PLAIN, cold_by(26.0, 10.0, 20.0, 30.0))
    assert cold.numbers["ratio"] == pytest.approx(1.3)
    assert list(check_warmth(PLAIN, cold_by(24.0, 20.0, 20.0, 20.0))) == []  # 20 % is borne
    # A stream without a length of time is another rule's affair.
    zero = [
        r.model_copy(update={"chunks": ((r.chunks[0][0], 1),) * 2})
        for r in cold_by(20.0, 20.0, 20.0, 20.0)
    ]
    assert list(check_warmth(PLAIN, [*cold_by(20.0)[:1], *zero[1:]])) == []


def test_scoring_servers_may_be_set_up_otherwise() -> None:
    first = CLEAN.servers[0]
    scorer = first.model_copy(
        update={
            "server_id": "scorer",
            "purpose": "score",
            "settings": {**(first.settings or {}), "threads": 7},
            "settings_after": {**(first.settings_after or {}), "threads": 9},
        }
    )
    assert rules(replace(CLEAN, servers=(*CLEAN.servers, scorer))) == set()


def test_prefix_hits_are_the_growth_of_the_counter() -> None:
    def counters(before: dict[str, float], after: dict[str, float]) -> RunRecords:
        return servers(lambda s: {"counters_before": before, "counters_after": after})

    grown = counters({"prefix_cache_hits": 5.0}, {"prefix_cache_hits": 7.0})
    assert numbers(grown, "warm_prefix") == {"hits": 2.0}
    assert numbers(counters({}, {"prefix_cache_hits": 1.0}), "warm_prefix") == {"hits": 1.0}
    assert "warm_prefix" not in rules(
        counters({"prefix_cache_hits": 5.0}, {"prefix_cache_hits": 5.0})
    )


def test_wanted_prompt_lengths_are_named() -> None:
    asked = one(prompt_tokens=500, usage=Usage(prompt=500, completion=32))
    assert numbers(asked, "prompt_length") == {"tokens": 500, "wanted": 512}
    received = one(usage=Usage(prompt=511, completion=32))
    assert numbers(received, "prompt_length") == {"tokens": 511, "wanted": 512}
    longer = one(prompt_tokens=500, usage=Usage(prompt=512, completion=32))
    assert [v.numbers for v in found(longer) if v.rule == "prompt_length"] == [
        {"tokens": 512, "wanted": 500},
        {"tokens": 500, "wanted": 512},
    ]


def test_an_output_in_one_chunk_is_no_mismatch() -> None:
    from finalbench.validity.counts import check_counts

    whole = a_request(PLAIN, sizes=[32])
    row = compute(CLEAN).cell(PLAIN.id)
    broken = check_counts(PLAIN, row, [whole] * 4, ignore_eos=True)
    assert {v.rule for v in broken} == {"request_count"}  # the same request, four times


def test_c03_a_plan_that_sizes_one_arm_otherwise_is_no_comparison() -> None:
    plan = CLEAN.run.plan
    key = CELL.server_key
    servers = {**plan.servers, key: {**plan.servers[key], "max_sequences": 99}}
    run = CLEAN.run.model_copy(update={"plan": plan.model_copy(update={"servers": servers})})
    (fault,) = found(replace(CLEAN, run=run))
    assert (fault.rule, fault.cell_id) == ("settings_differ", None)
    assert fault.message.startswith("max_sequences is not planned alike")


@pytest.mark.parametrize(
    ("stock", "named"),
    [
        ("random:1", set()),
        ("random", set()),  # another project's own draw, which has no seed to compare
        ("random:2", {"settings_differ"}),
    ],
)
def test_random_weights_of_one_seed_are_one_thing_and_unseeded_ones_are_left_out(
    stock: str, named: set[str]
) -> None:
    run = a_run(classes=Classes(weights="random", acceptance="measured"))
    records = make_records(run)
    weights = {"vk": "random:1", "stock": stock}
    served = tuple(s.model_copy(update=told("weights", weights[s.arm])(s)) for s in records.servers)
    broken = found(replace(records, servers=served))
    assert {v.rule for v in broken} == named
    assert all("random:1" in v.message and "random:2" in v.message for v in broken)
