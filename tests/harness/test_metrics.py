"""Rates and latencies on streams of known content: hand values to 1e-9, any chunking one answer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_records import MS, a_request, a_run, a_server, cell_of, make_records, scenario

from finalbench.metrics import (
    METRICS,
    Limits,
    Memory,
    acceptance,
    compute,
    compute_cell,
    measured,
    metric,
    timing,
    within_bounds,
)
from finalbench.metrics.distribution import FLOORS, distribution
from finalbench.metrics.rates import (
    Rate,
    buckets,
    decode_rate,
    e2e_rate,
    missing,
    peak_rate,
    pooled,
    sources,
    steady_rate,
    steady_window,
)
from finalbench.metrics.timing import Timing
from finalbench.plan import Cell
from finalbench.record import Classes, CounterWindow, RequestRecord, Spec, Usage

RUN = a_run()
EXACT = 1e-9


def a_cell(arm: str = "vk", draft: str = "none", **fields: Any) -> Cell:
    return cell_of(make_records(RUN), arm, draft, **fields)


CELL = a_cell()


def request(**fields: Any) -> RequestRecord:
    return a_request(CELL, **fields)


def row(requests: list[RequestRecord], *, cell: Cell = CELL, limits: Limits | None = None) -> Any:
    server = a_server(cell, 0, 0)
    return compute_cell(
        cell,
        requests,
        servers={server.server_id: server},
        model=RUN.scenario.model,
        memory=Memory(bytes_per_s=None, reason="not stated"),
        limits=limits,
    )


def test_decode_rate_by_hand() -> None:
    # 3 + 4 + 1 tokens 10 ms apart and 1 + 1 tokens 30 ms apart: 5 + 1 tokens in 20 + 30 ms.
    one = timing(request(sizes=[3, 4, 1], step_ms=10.0))
    two = timing(request(sizes=[1, 1], step_ms=30.0, start_ns=9_000 * MS))
    rate = decode_rate([one, two], 1)
    assert (rate.tokens, rate.requests, rate.token_source) == (6, 2, "ids")
    assert rate.seconds == pytest.approx(0.050, rel=EXACT)
    assert rate.value == pytest.approx(120.0, rel=EXACT)
    assert (rate.start_ns, rate.end_ns) == (1_050 * MS, 9_080 * MS)


def test_l12_prompt_time_and_length_do_not_enter_the_decode_rate() -> None:
    quick = decode_rate([timing(request(ttft_ms=5.0))], 1)
    slow = decode_rate([timing(request(ttft_ms=5_000.0))], 1)
    assert quick.value == pytest.approx(50.0, rel=EXACT)
    assert slow.value == pytest.approx(50.0, rel=EXACT)


def test_end_to_end_rate_by_hand() -> None:
    # 8 tokens, then 2; from the first schedule at 1,000 ms to the last event at 9,080 ms.
    one = timing(request(sizes=[3, 4, 1], step_ms=10.0, scheduled_ns=990 * MS))
    two = timing(request(sizes=[1, 1], step_ms=30.0, start_ns=9_000 * MS))
    rate = e2e_rate([two, one])
    assert rate.tokens == 10
    assert rate.seconds == pytest.approx(8.090, rel=EXACT)
    assert rate.value == pytest.approx(10 / 8.090, rel=EXACT)


def test_t10_f01_only_a_proper_end_earns_credit() -> None:
    good = request()
    faults = [
        request(done_seen=False),
        request(error="stream error after 5 tokens"),
        request(finish_reason=None),
        request(finish_reason="error"),
        request(status="failed"),
        request(status="incomplete"),
        request(chunks=(), token_ids=(), usage=None),
        request(chunks=(), token_ids=(), usage=Usage(prompt=512, completion=32)),
        request(token_ids=(), usage=None, sizes=[]),
        request(token_ids=(), usage=Usage(prompt=512, completion=0)),
    ]
    for bad in faults:
        assert not timing(bad).valid, bad
        alone = e2e_rate([timing(bad)])
        assert alone.value is None
        assert alone.reason == "no valid request"
    both = e2e_rate([timing(good), timing(faults[0])])
    assert both.tokens == 32


def test_t10_a_context_limited_output_is_credited_with_what_came() -> None:
    short = timing(request(sizes=[1, 1, 1]))
    assert short.tokens == 3
    assert e2e_rate([short]).tokens == 3


def test_failed_requests_keep_their_time_in_the_denominator() -> None:
    good = timing(request(start_ns=5_000 * MS))
    failed = timing(request(status="failed", error="x", start_ns=1_000 * MS))
    rate = e2e_rate([failed, good])
    assert rate.start_ns == 1_000 * MS
    assert rate.tokens == 32


def test_t04_t23_early_end_divides_by_what_was_produced() -> None:
    found = row([request(sizes=[1, 1, 1, 1, 1], step_ms=20.0, finish_reason="stop")])
    assert found.latencies["tpot_s"].mean == pytest.approx(0.020, rel=EXACT)
    assert found.tpot_token_weighted_s == pytest.approx(0.020, rel=EXACT)


def test_t16_token_gap_excludes_the_first_wait_and_divides_by_tokens() -> None:
    found = row([request(sizes=[3] * 5, step_ms=30.0, ttft_ms=500.0)])
    assert found.latencies["token_gap_s"].mean == pytest.approx(0.010, rel=EXACT)
    assert found.latencies["chunk_gap_s"].mean == pytest.approx(0.030, rel=EXACT)
    assert found.latencies["ttft_s"].mean == pytest.approx(0.500, rel=EXACT)
    assert found.latencies["token_gap_s"].n == 12


def test_tpot_request_and_token_weighted_differ_as_they_must() -> None:
    # 1 token in 30 ms, and 9 tokens in 90 ms: 20 ms per request, 12 ms per token.
    found = row(
        [request(sizes=[1, 1], step_ms=30.0), request(sizes=[1] * 10, step_ms=10.0, index=1)]
    )
    assert found.latencies["tpot_s"].mean == pytest.approx(0.020, rel=EXACT)
    assert found.tpot_token_weighted_s == pytest.approx(0.012, rel=EXACT)


def test_t01_t02_the_peak_weighs_tokens_and_is_never_below_the_mean() -> None:
    one = timing(request(sizes=[4] * 300, step_ms=10.0))
    assert one.first_ns is not None and one.last_ns is not None
    counts = buckets([one], one.first_ns, one.last_ns)
    assert len(counts) == 2
    assert sum(counts) == 1_200
    peak, mean = peak_rate([one]), e2e_rate([one])
    assert peak.value is not None and mean.value is not None
    assert peak.value >= mean.value
    # 1,200 tokens in 2.99 s, halved: the first half has 150 chunks, 600 tokens in 1.495 s.
    assert peak.value == pytest.approx(600 / 1.495, rel=EXACT)
    assert peak_rate([timing(request(sizes=[1, 1], step_ms=999.0))]).reason == (
        "the events span less than one bucket of 1 s"
    )
    assert peak_rate([timing(request(sizes=[1, 1], step_ms=1_000.0))]).value == 2.0


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=60),
    steps=st.lists(st.integers(1, 400), min_size=60, max_size=60),
)
def test_identities_hold_for_any_chunking(sizes: list[int], steps: list[int]) -> None:
    at, chunks = 1_050 * MS, []
    for size, step in zip(sizes, steps, strict=False):
        chunks.append((at, size))
        at += step * MS
    one = timing(request(sizes=sizes, chunks=tuple(chunks)))
    assert one.tokens == sum(sizes)
    for rate in (decode_rate([one], 1), e2e_rate([one]), peak_rate([one])):
        if rate.value is not None:
            assert rate.value * (rate.seconds or 0) == pytest.approx(rate.tokens, rel=EXACT)
    peak, mean = peak_rate([one]).value, e2e_rate([one]).value
    if peak is not None and mean is not None:
        assert peak >= mean * (1 - EXACT)
    if one.last_ns is not None and one.first_ns is not None and one.last_ns - one.first_ns >= 10**9:
        assert sum(buckets([one], one.first_ns, one.last_ns)) == sum(sizes)


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.booleans(), min_size=31, max_size=31))
def test_one_answer_for_any_chunking_of_the_same_tokens(cuts: list[bool]) -> None:
    """Tokens made 20 ms apart, flushed in chunks: the end-to-end rate does not see the chunks."""
    chunks, held = [], 0
    for index in range(32):
        held += 1
        if index == 31 or cuts[index]:
            chunks.append((1_050 * MS + index * 20 * MS, held))
            held = 0
    one = timing(request(sizes=[n for _, n in chunks], chunks=tuple(chunks)))
    assert e2e_rate([one]).value == pytest.approx(32 / 0.670, rel=EXACT)
    decode = decode_rate([one], 1)
    if decode.value is not None:
        assert decode.value == pytest.approx(50.0, rel=EXACT)


def test_t08_a_missing_count_is_null_with_a_reason() -> None:
    found = row([request(token_ids=(), usage=None, token_source=None)])
    assert found.decode_tok_s is None
    assert found.e2e_tok_s is None
    assert found.reasons["decode_tok_s"] == "no valid request"
    assert found.token_source is None


def test_usage_counts_where_ids_are_absent() -> None:
    usage = Usage(prompt=512, completion=32)
    by_chunk = request(token_ids=(), usage=usage)
    assert timing(by_chunk).source == "usage"
    assert decode_rate([timing(by_chunk)], 1).value == pytest.approx(50.0, rel=EXACT)
    bare = tuple((t, 0) for t, _ in request().chunks)
    one_each = timing(request(token_ids=(), usage=usage, chunks=bare))
    assert decode_rate([one_each], 1).value == pytest.approx(50.0, rel=EXACT)
    fewer = timing(request(token_ids=(), usage=usage, chunks=bare[:20]))
    assert fewer.tokens == 32
    assert decode_rate([fewer], 1).reason == "tokens of the first chunk are unknown"
    assert steady_rate([fewer] * 2, 2).value is None
    assert peak_rate([fewer]).reason == "tokens per chunk are unknown"
    assert e2e_rate([fewer]).token_source == "usage"
    mixed = e2e_rate([timing(by_chunk), timing(request())])
    assert mixed.token_source == "mixed"


def test_empty_chunks_are_no_events() -> None:
    chunks = ((1_010 * MS, 0), (1_050 * MS, 2), (1_070 * MS, 0), (1_090 * MS, 2))
    one = timing(request(sizes=[2, 2], chunks=chunks))
    assert one.first_ns == 1_050 * MS
    assert one.events == ((1_050 * MS, 2), (1_090 * MS, 2))
    assert decode_rate([one], 1).value == pytest.approx(50.0, rel=EXACT)


def test_t14_no_visible_token_gives_a_well_formed_row() -> None:
    found = row([request(sizes=[], usage=Usage(prompt=512, completion=0))])
    assert found.decode_tok_s is None
    assert found.latencies["tpot_s"].mean is None
    assert found.counts.ok == 1


def streams(count: int, each: int, step_ms: float, ends: int = 1) -> list[RequestRecord]:
    """`count` streams at once, `ends` requests each, back to back."""
    found = []
    for stream in range(count):
        now = 1_000 * MS + stream * 7 * MS
        for turn in range(ends):
            one = request(
                sizes=[1] * each, step_ms=step_ms, start_ns=now, index=stream * ends + turn
            )
            now = one.chunks[-1][0] + MS
            found.append(one)
    return found


def test_steady_window_by_hand() -> None:
    # Streams start at 1,000 and 1,007 ms; first tokens at 1,050 and 1,057; each ends 2 s later.
    timings = [timing(r) for r in streams(2, 201, 10.0)]
    rate = steady_rate(timings, 2)
    assert (rate.start_ns, rate.end_ns) == (1_057 * MS, 3_050 * MS)
    # (1,057, 3,050]: stream one has 200 events less the one at 1,050; stream two those to 3,047.
    assert rate.tokens == 200 + 199
    assert rate.value == pytest.approx(399 / 1.993, rel=EXACT)
    assert steady_rate(timings, 1).reason == "steady_tok_s is defined for more than one stream"
    assert steady_rate(timings, 3).reason == "the streams were never all in flight"
    assert decode_rate(timings, 2).reason == "decode_tok_s is defined for one stream only"


def test_steady_window_needs_a_second() -> None:
    short = steady_rate([timing(r) for r in streams(2, 100, 10.0)], 2)
    assert short.value is None
    assert short.reason == "the steady window of 0.983 s is shorter than 1 s"


def test_c11_f04_events_and_not_requests_are_assigned_to_the_window() -> None:
    """Three turns a stream: those that overlap the window's edges count by their events."""
    timings = [timing(r) for r in streams(2, 101, 10.0, ends=3)]
    rate = steady_rate(timings, 2)
    assert rate.start_ns is not None and rate.end_ns is not None
    inside = sum(n or 0 for t in timings for at, n in t.events if rate.start_ns < at <= rate.end_ns)
    assert rate.tokens == inside
    assert 0 < inside < 6 * 101
    # Both streams give a token each 10 ms but for the waits between turns.
    assert rate.value == pytest.approx(200, rel=0.06)


def test_l08_steady_rate_of_a_closed_form_queue_within_2_percent() -> None:
    """Four servers of 5 ms a token: 800 tok/s, which ramp and drain hide from the plain rate."""
    timings = [timing(r) for r in streams(4, 1_000, 5.0)]
    steady, whole = steady_rate(timings, 4).value, e2e_rate(timings).value
    assert steady == pytest.approx(800, rel=0.02)
    assert whole is not None and steady is not None
    assert whole < steady


def test_l01_latency_from_the_schedule_shows_the_waiting() -> None:
    late = [
        request(index=i, scheduled_ns=1_000 * MS, start_ns=1_000 * MS + i * 300 * MS)
        for i in range(12)
    ]
    found = row(late)
    assert found.latencies["e2e_s"].mean == pytest.approx(0.670, rel=EXACT)
    assert found.latencies["e2e_scheduled_s"].mean == pytest.approx(0.670 + 5.5 * 0.3, rel=EXACT)
    assert found.latencies["ttft_scheduled_s"].p50 == pytest.approx(0.050 + 5 * 0.3, rel=EXACT)


def test_t13_latency_ends_at_the_last_content_event() -> None:
    plain = row([request()])
    delayed = row([request(done_ns=99_000 * MS)])
    assert plain.latencies["e2e_s"].mean == delayed.latencies["e2e_s"].mean
    assert plain.e2e_tok_s == delayed.e2e_tok_s


def test_l14_numerator_and_denominator_cover_the_same_requests() -> None:
    steady = [request(index=i, start_ns=(1 + i) * 10_000 * MS) for i in range(3)]
    long_last = request(index=3, start_ns=50_000 * MS, sizes=[1] * 3_200)
    rate = decode_rate([timing(r) for r in [*steady, long_last]], 1)
    assert rate.value == pytest.approx(50.0, rel=EXACT)


def test_percentiles_are_null_below_their_floor() -> None:
    for name, floor in FLOORS.items():
        below = distribution([float(i) for i in range(floor - 1)])
        at = distribution([float(i) for i in range(1, floor + 1)])
        assert getattr(below, name) is None
        assert below.reasons[name] == f"{floor - 1} samples; {name} needs {floor}"
        assert getattr(at, name) is not None
        assert name not in at.reasons
    assert FLOORS == {"p50": 11, "p90": 64, "p95": 130, "p99": 662, "p99_9": 6636}


def test_percentiles_are_nearest_rank() -> None:
    found = distribution([float(i) for i in range(1, 101)])
    assert (found.p50, found.p90, found.mean) == (50.0, 90.0, 50.5)
    assert distribution([float(i) for i in range(1, 71)]).p90 == 63.0
    weighted = distribution([1.0] * 10 + [2.0] * 10, [1] * 10 + [4] * 10)
    assert (weighted.n, weighted.p50, weighted.mean) == (50, 2.0, 1.8)
    empty = distribution([])
    assert (empty.n, empty.mean, empty.reasons["p50"]) == (0, None, "no sample")
    assert empty.reasons["mean"] == "no sample"


def test_goodput_counts_against_scheduled_requests() -> None:
    requests = [request(index=i) for i in range(3)]
    requests.append(request(index=3, status="failed", error="lost"))
    good = row(requests, limits=Limits(ttft_s=0.05, tpot_s=0.02, e2e_s=0.67))
    assert good.goodput_share == pytest.approx(3 / 4)
    assert row(requests, limits=Limits(ttft_s=0.049)).goodput_share == 0.0
    assert row(requests, limits=Limits(tpot_s=0.019)).goodput_share == 0.0
    assert row(requests, limits=Limits(e2e_s=0.669)).goodput_share == 0.0
    late = [request(index=i, scheduled_ns=990 * MS) for i in range(4)]
    assert row(late, limits=Limits(ttft_s=0.055)).goodput_share == 0.0
    assert row(requests).reasons["goodput_share"] == "no limits were declared"


def test_s04_acceptance_is_pooled_by_verify_rounds_of_these_requests() -> None:
    drafting = a_cell(draft="mtp3")
    few = a_request(
        drafting,
        spec=Spec(drafts=10, draft_tokens=30, accepted_tokens=20, accepted_per_pos=(10, 6, 4)),
    )
    many = a_request(
        drafting,
        index=1,
        spec=Spec(drafts=30, draft_tokens=90, accepted_tokens=10, accepted_per_pos=(8, 2, 0)),
    )
    found = row([few, many], cell=drafting)
    assert found.acceptance_length == pytest.approx(1 + 30 / 40, rel=EXACT)
    assert found.acceptance.rate == pytest.approx(30 / 120, rel=EXACT)
    assert found.acceptance.per_position == pytest.approx((18 / 40, 8 / 40, 4 / 40))
    unknown = row([few, many.model_copy(update={"spec": None})], cell=drafting)
    assert unknown.acceptance_length is None
    assert unknown.reasons["acceptance_length"] == "a request has no draft counters"
    none = row([request()])
    assert none.reasons["acceptance_length"] == "no drafts in this cell"
    idle = Spec(drafts=0, draft_tokens=0, accepted_tokens=0)
    empty = row([few.model_copy(update={"spec": idle})], cell=drafting)
    assert empty.reasons["acceptance_length"] == "no verify round took place"


def test_acceptance_by_position_pads_short_records() -> None:
    short = Spec(drafts=5, draft_tokens=5, accepted_tokens=5, accepted_per_pos=(5,))
    long = Spec(drafts=5, draft_tokens=15, accepted_tokens=6, accepted_per_pos=(3, 2, 1))
    found = acceptance([short, long])
    assert found.per_position == pytest.approx((0.8, 0.2, 0.1))
    assert (found.drafts, found.draft_tokens, found.accepted_tokens) == (10, 20, 11)
    assert found.reason is None
    silent = acceptance([Spec(drafts=5, draft_tokens=0, accepted_tokens=0)])
    assert (silent.length, silent.rate, silent.reason) == (1.0, None, "no token was proposed")
    unknown = acceptance([None])
    assert (unknown.drafts, unknown.draft_tokens, unknown.accepted_tokens) == (0, 0, 0)


def test_latencies_are_those_of_valid_requests() -> None:
    good = request(connect_ns=3 * MS)  # a length of time, before the send
    failed = request(index=1, status="failed", error="x", ttft_ms=900.0)
    found = row([good, failed])
    assert found.latencies["ttft_s"].n == 1
    assert found.latencies["ttft_s"].mean == pytest.approx(0.050, rel=EXACT)
    assert found.latencies["chunk_gap_s"].n == 31
    assert found.latencies["connect_s"].mean == pytest.approx(0.003, rel=EXACT)
    assert row([request()]).reasons["connect_s.mean"] == "no connection was opened"


def test_a_single_chunk_has_no_gap_and_no_time_per_token() -> None:
    whole = request(sizes=[32])
    found = row([whole])
    assert found.decode_tok_s is None
    assert found.reasons["decode_tok_s"] == "no request has a token after its first chunk"
    assert found.latencies["tpot_s"].mean is None
    assert found.tpot_token_weighted_s is None
    assert found.reasons["tpot_token_weighted_s"] == "no valid request with a second token"
    assert found.reasons["token_gap_s.mean"] == "no second chunk"
    assert found.latencies["e2e_s"].mean == pytest.approx(0.050, rel=EXACT)
    both = row([whole, request(index=1)])
    assert both.rates["decode_tok_s"].requests == 1
    assert both.rates["decode_tok_s"].tokens == 31
    assert both.latencies["tpot_s"].n == 1
    limits = Limits(tpot_s=0.001)
    assert row([whole], limits=limits).goodput_share == pytest.approx(1 / 4)
    assert row([], limits=limits).reasons["goodput_share"] == "no request was scheduled"


def test_gaps_of_unknown_chunks_are_unknown() -> None:
    bare = tuple((t, 0) for t, _ in request().chunks[:20])
    usage = Usage(prompt=512, completion=32)
    unknown = request(token_ids=(), usage=usage, chunks=bare)
    found = row([unknown])
    assert found.reasons["token_gap_s.mean"] == "tokens per chunk are unknown"
    assert found.latencies["chunk_gap_s"].n == 19
    one = timing(unknown)
    assert (one.tokens, one.first_tokens, one.decode_tokens) == (32, None, None)
    assert one.decode_ns == 19 * 20 * MS
    uncounted = timing(request(token_ids=(), usage=None))
    assert (uncounted.tokens, uncounted.decode_tokens) == (None, None)
    none = timing(request(sizes=[]))
    assert (none.decode_ns, none.first_ns, none.last_ns) == (None, None, None)


def test_events_follow_the_chunks_whatever_their_sum() -> None:
    short = request(token_ids=tuple(range(30)))
    assert timing(short).tokens == 30
    assert timing(short).events == short.chunks
    chunks = ((1_050 * MS, 1), (1_070 * MS, 0), (1_090 * MS, 1))
    assert timing(request(sizes=[1, 1], chunks=chunks)).events == (chunks[0], chunks[2])
    fours = request(sizes=[4] * 8)
    by_usage = fours.model_copy(update={"token_ids": (), "token_source": "usage"})
    assert timing(by_usage).events == fours.chunks
    assert timing(by_usage).decode_tokens == 28


@pytest.mark.parametrize("draft", ["none", "mtp3"])
def test_every_null_has_a_reason_and_every_reason_a_null(draft: str) -> None:
    cell = a_cell(draft=draft)
    for requests in ([], [a_request(cell)], [a_request(cell, sizes=[32])]):
        found = row(requests, cell=cell)
        nulls = {
            name
            for name in (
                "decode_tok_s",
                "decode_tok_s_interval",
                "e2e_tok_s",
                "steady_tok_s",
                "peak_tok_s",
                "tpot_token_weighted_s",
                "acceptance_length",
                "goodput_share",
                "bandwidth_share",
                "limit_tok_s",
            )
            if getattr(found, name) is None
        }
        assert {name for name in found.reasons if "." not in name} == nulls
        for name, latency in found.latencies.items():
            for part in ("mean", *FLOORS):
                assert (getattr(latency, part) is None) == (f"{name}.{part}" in found.reasons)


def test_failed_requests_do_not_mix_the_token_source() -> None:
    failed = request(index=1, token_ids=(), status="failed", error="x")
    assert row([request(), failed]).token_source == "ids"


def test_a_cells_peak_is_its_best_block_and_needs_every_block() -> None:
    slow = request(sizes=[1] * 60, step_ms=50.0)
    fast = request(sizes=[1] * 60, step_ms=40.0, block=1, server_id="s1")
    short = request(sizes=[1] * 10, step_ms=40.0, block=2, server_id="s2")
    found = row([slow, fast])
    best = peak_rate([timing(fast)])
    assert found.rates["peak_tok_s"] == best
    assert found.peak_tok_s == best.value
    cut = row([slow, fast, short])
    assert cut.peak_tok_s is None
    assert cut.reasons["peak_tok_s"] == "the events span less than one bucket of 1 s"


def test_acceptance_is_that_of_valid_requests() -> None:
    cell = a_cell(draft="mtp3")
    good = a_request(cell)
    cut = a_request(cell, index=1, status="failed", error="x", spec=None)
    found = row([good, cut], cell=cell)
    assert found.acceptance_length == pytest.approx(1 + 18 / 13)
    lost = row([cut], cell=cell)
    assert lost.reasons["acceptance_length"] == "no valid request"


def test_a_table_finds_its_cells() -> None:
    table = compute(make_records(RUN))
    for cell in RUN.plan.cells:
        assert table.cell(cell.id).id == cell.id
    assert table.schema_version == 1


def test_missing_rates_credit_no_request() -> None:
    assert decode_rate([], 1).requests == 0
    assert decode_rate([], 1).reason == "no valid request"


def test_the_first_good_attempt_counts_and_no_luckier_one() -> None:
    failed = request(status="failed", error="died", request_id="a")
    good = request(request_id="b", roll=1, server_id="s2", step_ms=20.0)
    lucky = request(request_id="c", roll=2, server_id="s3", step_ms=10.0)
    warm = request(request_id="w", warmup=True)
    chosen = measured(CELL, [failed, warm, good, lucky])
    assert [r.request_id for r in chosen] == ["b"]
    only_failed = measured(CELL, [failed, failed.model_copy(update={"request_id": "a2"})])
    assert [r.request_id for r in only_failed] == ["a2"]
    counts = row([failed, warm, good, lucky]).counts
    assert (counts.recorded, counts.repeated, counts.warmup, counts.ok) == (1, 2, 1, 1)


def test_windows_never_span_two_servers() -> None:
    """Monotonic clocks of two rolls have nothing in common; their spans are added."""
    one = request(start_ns=1_000 * MS)
    two = request(index=1, roll=1, server_id="other", start_ns=5 * MS)
    found = row([one, two])
    assert found.rates["e2e_tok_s"].seconds == pytest.approx(2 * 0.670, rel=EXACT)
    assert len(found.blocks) == 1
    assert found.blocks[0].e2e.tokens == 64


def test_rows_cover_the_plan_and_pool_their_blocks() -> None:
    records = make_records(RUN)
    table = compute(records)
    assert [c.id for c in table.cells] == [c.id for c in RUN.plan.cells]
    for found in table.cells:
        assert found.counts.scheduled == found.counts.ok == 16
        assert len(found.decode_tok_s_blocks) == 4
        tokens = sum(b.decode.tokens or 0 for b in found.blocks)
        assert found.rates["decode_tok_s"].tokens == tokens
        assert found.decode_tok_s_interval is not None
        low, high = found.decode_tok_s_interval
        assert low < (found.decode_tok_s or 0) < high
        assert found.runtime == "process"
        assert [d.domain for d in found.domains] == ["chat", "code"]
        for name in ("steady_tok_s", "bandwidth_share", "goodput_share"):
            assert getattr(found, name) is None
            assert found.reasons[name]


def test_a_cell_without_requests_is_a_row_of_nulls() -> None:
    found = row([])
    assert found.counts.scheduled == 0
    assert found.decode_tok_s is None
    assert found.decode_tok_s_interval is None
    assert found.reasons["decode_tok_s"] == "no block was measured"
    assert found.reasons["decode_tok_s_interval"] == "no block has a decode rate"


def test_l11_labels_come_from_the_registry() -> None:
    assert {m.id: m.column for m in METRICS.values()} == {
        "decode_tok_s": "Decode rate (tok/s)",
        "e2e_tok_s": "End-to-end rate (tok/s)",
        "steady_tok_s": "Steady rate (tok/s)",
        "peak_tok_s": "Peak rate (tok/s)",
        "ttft_s": "Time to first token (s)",
        "ttft_scheduled_s": "Time to first token from schedule (s)",
        "tpot_s": "Time per output token (s)",
        "tpot_token_weighted_s": "Time per output token, token-weighted (s)",
        "chunk_gap_s": "Gap between chunks (s)",
        "token_gap_s": "Gap between tokens (s)",
        "e2e_s": "Latency (s)",
        "e2e_scheduled_s": "Latency from schedule (s)",
        "connect_s": "Connection time (s)",
        "acceptance_length": "Acceptance length (tokens/round)",
        "acceptance_rate": "Acceptance rate",
        "cache_hit_share": "Prompt tokens from a prefix cache",
        "goodput_share": "Goodput",
        "bandwidth_share": "Share of the bandwidth limit",
        "limit_tok_s": "Bandwidth limit (tok/s)",
    }
    assert all(m.formula and m.version == 1 for m in METRICS.values())
    bounds = {"rate": {(1e-3, 1e8)}, "time": {(1e-9, 86_400.0)}}
    bounds["ratio"] = {(1.0, 9.0), (0.0, 1.0)}
    for scale, known in bounds.items():
        assert {m.bounds for m in METRICS.values() if m.scale == scale} == known
    assert METRICS["acceptance_length"].bounds == (1.0, 9.0)
    for low_edge in (METRICS["ttft_s"], METRICS["decode_tok_s"], METRICS["goodput_share"]):
        assert all(within_bounds(low_edge.id, edge) for edge in low_edge.bounds)
    with pytest.raises(KeyError, match="unknown metric 'tps'; metrics are decode_tok_s"):
        metric("tps")


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("decode_tok_s", "higher"),
        ("ttft_s", "lower"),
        ("tpot_s", "lower"),
        ("goodput_share", "higher"),
    ],
)
def test_g09_each_metric_declares_its_better_direction(name: str, better: str) -> None:
    assert METRICS[name].better == better
    assert METRICS[name].higher_is_better is (better == "higher")


def test_l15_unit_faults_are_out_of_bounds() -> None:
    assert within_bounds("decode_tok_s", 601.0)
    assert not within_bounds("decode_tok_s", 601.0 * 1e9)
    assert not within_bounds("decode_tok_s", 601.0 * 1e-9)
    assert not within_bounds("tpot_s", -1.0)
    assert not within_bounds("tpot_s", 0.0)
    assert not within_bounds("tpot_s", float("nan"))
    assert within_bounds("acceptance_length", 1.0)
    assert not within_bounds("acceptance_length", 0.9)


def test_scenarios_of_many_streams_use_the_steady_rate() -> None:
    spec = scenario(
        axes={
            "seq_len": (128,),
            "output_len": (32,),
            "sampling": ("greedy",),
            "draft": ("none",),
            "concurrency": (1, 2),
        },
        base={"seq_len": 128, "output_len": 32, "sampling": "greedy", "draft": "none"},
    )
    records = make_records(a_run(spec))
    for found in compute(records).cells:
        name = "decode_tok_s" if found.concurrency == 2 else "steady_tok_s"
        assert found.rates[name].value is None


def test_ids_that_are_not_told_by_chunk_give_latencies_but_no_decode_rate() -> None:
    silent = tuple((t, 0) for t, _ in request().chunks[:20])
    found = row([request(chunks=silent)])
    assert found.latencies["ttft_s"].mean == pytest.approx(0.050, rel=EXACT)
    assert found.reasons["decode_tok_s"] == "tokens of the first chunk are unknown"
    assert found.rates["e2e_tok_s"].tokens == 32


def silent(**fields: Any) -> RequestRecord:
    """A request that failed before anything came."""
    return request(chunks=(), token_ids=(), usage=None, status="failed", error="reset", **fields)


def test_a_request_that_gave_nothing_has_no_last_event() -> None:
    rate = e2e_rate([timing(silent(start_ns=500 * MS)), timing(request())])
    assert (rate.start_ns, rate.end_ns) == (500 * MS, 1_670 * MS)
    assert rate.tokens == 32


def stream(index: int, start_s: float, end_s: float, **fields: Any) -> Timing:
    """Ten chunks of one token, evenly from `start_s` + 0.1 s to `end_s`."""
    first, last = round((start_s + 0.1) * 1e9), round(end_s * 1e9)
    chunks = tuple((first + (last - first) * i // 9, 1) for i in range(10))
    start = round(start_s * 1e9)
    made = request(sizes=[1] * 10, index=index, start_ns=start, chunks=chunks, **fields)
    return timing(made)


def test_steady_window_of_two_streams_by_hand() -> None:
    """Streams A then C, and B then D, each sent when the last one ended."""
    a, b = stream(0, 0.0, 2.0), stream(1, 0.2, 3.0)
    c, d = stream(2, 2.0, 6.0), stream(3, 3.0, 7.0)
    # From B's first token at 0.3 s to C's end at 6 s: D is running, nothing follows C.
    rate = steady_rate([d, b, c, a], 2)
    assert (rate.start_ns, rate.end_ns) == (300_000_000, 6_000_000_000)
    inside = [at for t in (a, b, c, d) for at, _ in t.events if 3 * 10**8 < at <= 6 * 10**9]
    assert (rate.tokens, rate.requests) == (len(inside), 4)
    # D is sent at the instant at which B ends: that end has a successor.
    assert steady_window([a, b, c, d], 2) == (300_000_000, 6_000_000_000)


def test_steady_window_passes_over_requests_that_gave_nothing() -> None:
    streams = [stream(0, 0.0, 2.0), stream(1, 0.2, 3.0), stream(2, 2.0, 6.0), stream(3, 3.0, 7.0)]
    early = timing(silent(index=4, start_ns=0))
    late = timing(silent(index=5, start_ns=6_500 * MS))
    rate = steady_rate([early, *streams, late], 2)
    assert (rate.start_ns, rate.end_ns, rate.requests) == (300_000_000, 6_000_000_000, 4)
    assert steady_rate([early, streams[0]], 2).reason == "the streams were never all in flight"


def test_a_stream_that_ends_as_the_window_opens_is_outside() -> None:
    # A ends at 1.5 s, when B gives its first token.
    a, b = stream(0, 0.0, 1.5), stream(1, 1.4, 5.0)
    c = stream(2, 1.6, 4.0)
    rate = steady_rate([a, b, c], 2)
    assert rate.start_ns == 1_500_000_000
    assert rate.requests == 2


def test_a_window_of_exactly_one_second_is_enough() -> None:
    assert steady_rate([stream(0, 0.0, 1.3), stream(1, 0.2, 1.4)], 2).seconds == 1.0
    short = steady_rate([stream(0, 0.0, 1.3 - 1e-9), stream(1, 0.2, 1.4)], 2)
    assert short.reason == "the steady window of 1.000 s is shorter than 1 s"


def test_the_peak_states_its_window_and_leaves_failures_out() -> None:
    # One token a second for 4 s, but 7 at 2.5 s: buckets of 1 s from the first event at 1 s.
    times = [1.0, 2.0, 3.5, 4.2, 5.0]
    chunks = tuple((round(t * 1e9), 7 if t == 3.5 else 1) for t in times)
    good = timing(request(sizes=[1, 1, 7, 1, 1], chunks=chunks, start_ns=10**9 - 1))
    failed = timing(request(index=1, sizes=[90], start_ns=10**9, status="failed", error="x"))
    peak = peak_rate([good, failed])
    assert (peak.tokens, peak.seconds, peak.requests) == (7, pytest.approx(1.0), 1)
    assert (peak.start_ns, peak.end_ns) == (3 * 10**9, 4 * 10**9)
    assert peak.value == pytest.approx(7.0)


def test_blocks_are_pooled_by_their_parts() -> None:
    def rate(tokens: int, seconds: float, start: int, source: str = "ids") -> Rate:
        return Rate(
            value=tokens / seconds,
            tokens=tokens,
            seconds=seconds,
            start_ns=start,
            end_ns=start + 5,
            token_source=source,
            requests=2,
        )

    both = pooled([rate(30, 2.0, 100), missing("cold"), rate(10, 3.0, 50)])
    assert (both.tokens, both.seconds, both.value, both.requests) == (40, 5.0, 8.0, 4)
    assert (both.start_ns, both.end_ns, both.token_source) == (50, 105, "ids")
    assert pooled([rate(1, 1.0, 0), rate(1, 1.0, 0, "usage")]).token_source == "mixed"
    assert pooled([missing("cold"), missing("late")]).reason == "cold"
    assert pooled([]).reason == "no block was measured"


def test_sources_of_requests() -> None:
    ids, usage = timing(request()), timing(request(token_ids=()))
    none = timing(silent())
    assert (sources([ids, none]), sources([none]), sources([ids, usage])) == ("ids", None, "mixed")


def test_a_span_of_one_nanosecond_is_a_span() -> None:
    close = request(sizes=[1, 1], chunks=((10**9, 1), (10**9 + 1, 1)))
    assert decode_rate([timing(close)], 1).value == pytest.approx(1e9)
    same = request(sizes=[1, 1], chunks=((10**9, 1), (10**9, 1)))
    assert decode_rate([timing(same)], 1).reason == "the time span is 0 ns"


def test_token_gaps_need_every_request_to_be_counted() -> None:
    counted = request(sizes=[1, 1, 1])
    usage = {"token_ids": (), "usage": Usage(prompt=512, completion=9)}
    partly = request(index=1, sizes=[2, 2, 2], **usage)  # 6 told by chunk, 9 in all
    assert timing(partly).events == tuple((at, None) for at, _ in partly.chunks)
    assert timing(partly).weighed == []
    assert timing(counted).weighed == list(counted.chunks)
    found = row([counted, partly])
    assert found.latencies["token_gap_s"].mean is None
    assert found.reasons["token_gap_s.mean"] == "tokens per chunk are unknown"
    assert found.latencies["chunk_gap_s"].n == 4


def test_every_metric_and_the_table_state_their_version() -> None:
    assert {m.version for m in METRICS.values()} == {1}
    assert compute(make_records(RUN)).schema_version == 1


def test_random_weights_are_named_by_their_shape() -> None:
    run = a_run(classes=Classes(weights="random", acceptance="measured"))
    assert {c.model for c in compute(make_records(run)).cells} == {f"{CELL.model} shape"}
    assert {c.model for c in compute(make_records(RUN)).cells} == {CELL.model}


def test_limits_of_the_scenario_give_the_goodput() -> None:
    spec = scenario(workload={"requests": 4, "limits": {"e2e_s": 1e-3}})
    records = make_records(a_run(spec))
    assert {c.goodput_share for c in compute(records).cells} == {0.0}
    assert {c.goodput_share for c in compute(records, limits=Limits(e2e_s=60.0)).cells} == {1.0}
    assert {c.goodput_share for c in compute(make_records(RUN)).cells} == {None}


def by_window(requests: list[RequestRecord], *windows: CounterWindow, known: bool = True) -> Any:
    drafted = a_cell(draft="mtp3")
    server = a_server(drafted, 0, 0).model_copy(update={"windows": windows})
    return compute_cell(
        drafted,
        requests,
        servers={server.server_id: server} if known else {},
        model=RUN.scenario.model,
        memory=Memory(bytes_per_s=None, reason="not stated"),
    )


def test_counters_of_the_server_stand_in_where_requests_have_none() -> None:
    drafted = a_cell(draft="mtp3")
    silent_ones = [a_request(drafted, index=i, spec=None, domain="code") for i in range(2)]
    own = CounterWindow(
        cell_id=drafted.id,
        generation_tokens=None,
        spec=Spec(drafts=10, draft_tokens=30, accepted_tokens=15),
    )
    other = own.model_copy(update={"cell_id": "else", "spec": Spec(**{**SPEC, "drafts": 1})})
    found = by_window(silent_ones, own, other)
    assert found.acceptance_length == pytest.approx(2.5)
    # Not known by domain: the window does not tell requests apart.
    assert [d.acceptance_length for d in found.domains] == [None]
    assert by_window(silent_ones).acceptance_length is None
    assert by_window(silent_ones, own, known=False).acceptance_length is None
    # A request's own counters come first.
    told = [a_request(drafted, index=0), *silent_ones[1:]]
    counters = told[0].spec
    assert counters is not None
    expected = 1 + counters.accepted_tokens / counters.drafts
    mixed = by_window(told, own)
    assert mixed.acceptance_length in (None, pytest.approx(expected))
    alone = by_window(told[:1], own)
    assert alone.acceptance_length == pytest.approx(expected)
    assert [d.acceptance_length for d in alone.domains] == [pytest.approx(expected)]


SPEC = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 15}


def test_domains_take_valid_drafting_requests_only() -> None:
    drafted = a_cell(draft="mtp3")
    good = a_request(drafted, index=0, domain="code")
    counters = good.spec
    assert counters is not None
    lucky = Spec(drafts=1, draft_tokens=3, accepted_tokens=3)
    failed = a_request(drafted, index=1, domain="code", status="failed", error="x", spec=lucky)
    (domain,) = by_window([good, failed]).domains
    assert domain.acceptance_length == pytest.approx(1 + counters.accepted_tokens / counters.drafts)
    (lost,) = by_window([failed]).domains
    assert lost.acceptance_length is None
    (plain,) = row([request(domain="code", spec=lucky)]).domains
    assert plain.acceptance_length is None
