"""G12: cold, warm and shared-prefix cells, each checked by the server's own counters."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_records import a_request, a_run, cell_of, make_records, scenario, write_run

from finalbench.aggregate import analyse, leaderboard, summary
from finalbench.arms import serve_command
from finalbench.metrics import compute
from finalbench.plan import Cell, make_plan
from finalbench.record import CounterWindow, RunRecords, ServerRecord
from finalbench.report.run_view import RunView
from finalbench.report.tables import cells_table
from finalbench.scenario import cached_share
from finalbench.validity import Violation, check

AXES = {
    "seq_len": (512,),
    "output_len": (32,),
    "sampling": ("greedy",),
    "draft": ("none",),
    "cache": ("cold", "warm", "prefix-50"),
}
BASE = {"seq_len": 512, "output_len": 32, "sampling": "greedy", "draft": "none"}
SPEC = scenario(axes=AXES, base=BASE)
RUN = a_run(SPEC)
CLEAN = make_records(RUN)
STATES = ("cold", "warm", "prefix-50")
REQUESTS = 4  # of a cell on one server


def cell(state: str, arm: str = "vk") -> Cell:
    return cell_of(CLEAN, arm, "none", cache=state)


def counted(hits: dict[str, int | None], *, queries: int | None = 2048, **settings: Any) -> Any:
    """The clean run with these hits counted in each window of the state's cells."""
    changed = []
    for server in CLEAN.servers:
        windows = tuple(
            CounterWindow(cell_id=c.id, prefix_queries=queries, prefix_hits=hits[c.cache])
            for c in RUN.plan.cells
            if c.server_key == server.server_key
        )
        told = {**(server.settings or {}), **settings}
        after = {**(server.settings_after or {}), **settings}
        changed.append(
            server.model_copy(
                update={"windows": windows, "settings": told, "settings_after": after}
            )
        )
    return replace(CLEAN, servers=tuple(changed))


def every_server(records: RunRecords, **updates: Any) -> tuple[ServerRecord, ...]:
    return tuple(s.model_copy(update=updates) for s in records.servers)


def found(records: RunRecords) -> list[Violation]:
    return check(records, compute(records))


def by_cell(records: RunRecords) -> dict[str | None, set[str]]:
    named: dict[str | None, set[str]] = {}
    for fault in found(records):
        state = next((c.cache for c in RUN.plan.cells if c.id == fault.cell_id), None)
        named.setdefault(state, set()).add(fault.rule)
    return named


def test_states_are_planned_apart_and_cold_ones_as_before() -> None:
    assert [cached_share(s) for s in (*STATES, "prefix-7")] == [0.0, 1.0, 0.5, 0.07]
    assert [cell(s).shared_tokens for s in STATES] == [0, 512, 256]
    plain = make_plan(scenario(axes={k: v for k, v in AXES.items() if k != "cache"}, base=BASE))
    cold = [c for c in RUN.plan.cells if c.cache == "cold"]
    assert [c.id for c in plain.cells] == [c.id for c in cold]
    assert [c.pair_key for c in plain.cells] == [c.pair_key for c in cold]
    assert {c.axis for c in RUN.plan.cells if c.cache != "cold"} == {"cache"}
    assert len({c.pair_key for c in RUN.plan.cells}) == len(STATES)
    assert cell("warm").label.endswith(" warm")
    assert not cell("cold").label.endswith("cold")


def test_a_cell_that_finds_what_it_plans_breaks_no_rule() -> None:
    good = counted({"cold": 0, "warm": 512 * REQUESTS, "prefix-50": 256 * REQUESTS})
    assert found(good) == []
    table = compute(good)
    shares = [table.cell(cell(s).id).cache_hit_share for s in STATES]
    assert shares == [0.0, 1.0, 0.5]
    labels = [table.cell(cell(s).id).cache_label for s in STATES]
    assert labels == [
        "",
        "warm prompts, 100% from the cache",
        "prefix-50 prompts, 50% from the cache",
    ]


@pytest.mark.parametrize(
    ("state", "hits", "named"),
    [
        # Whole blocks, and the last token is always computed: 64 tokens a prompt are borne.
        ("warm", 448 * REQUESTS, set()),
        ("warm", 448 * REQUESTS - 1, {"cache_state"}),
        ("prefix-50", 192 * REQUESTS, set()),
        ("prefix-50", 192 * REQUESTS - 1, {"cache_state"}),
        ("prefix-50", 320 * REQUESTS, set()),
        ("prefix-50", 320 * REQUESTS + 1, {"cache_state"}),
        ("warm", 0, {"cache_state"}),
        ("cold", 1, {"warm_prefix"}),
    ],
)
def test_a_cell_that_finds_otherwise_is_invalid(state: str, hits: int, named: set[str]) -> None:
    good = {"cold": 0, "warm": 512 * REQUESTS, "prefix-50": 256 * REQUESTS}
    records = counted({**good, state: hits})
    assert by_cell(records) == ({state: named} if named else {})
    for fault in found(records):
        assert fault.severity == "invalid"
        assert fault.block in range(4)
        known = {"hits": hits} if state == "cold" else {"found": hits / REQUESTS}
        assert known.items() <= fault.numbers.items()


@pytest.mark.parametrize(("seq_len", "slack"), [(64, 16), (256, 32), (1024, 64)])
def test_short_prompts_are_borne_less(seq_len: int, slack: int) -> None:
    from finalbench.validity.cache import check_cache

    short = cell("warm").model_copy(update={"seq_len": seq_len})
    request = a_request(short)
    server = CLEAN.servers[0].model_copy(update={"server_id": request.server_id})
    for hits, named in ((seq_len - slack, 0), (seq_len - slack - 1, 1)):
        window = CounterWindow(cell_id=short.id, prefix_queries=1, prefix_hits=hits)
        known = {server.server_id: server.model_copy(update={"windows": (window,)})}
        faults = list(check_cache(short, [request, a_request(short, warmup=True)], known))
        assert len(faults) == named
        assert all(f.numbers["slack"] == slack for f in faults)


@pytest.mark.parametrize(
    ("queries", "settings"),
    [(0, {}), (None, {"prefix_caching": False}), (5, {"prefix_caching": False})],
)
def test_a_server_without_a_cache_says_so_and_its_rows_too(
    queries: int | None, settings: dict[str, Any]
) -> None:
    none = counted(dict.fromkeys(STATES, 0), queries=queries, **settings)
    assert by_cell(none) == {"warm": {"cache_absent"}, "prefix-50": {"cache_absent"}}
    assert {f.severity for f in found(none)} == {"warning"}
    assert {f.numbers["servers"] for f in found(none)} == {4}
    row = compute(none).cell(cell("warm").id)
    assert row.cache_hit_share is None
    assert "no prefix cache" in row.reasons["cache_hit_share"]
    assert row.cache_label == "warm prompts, no cache"
    # A cold cell needs no cache; what its server is stands in its row all the same.
    cold = compute(none).cell(cell("cold").id)
    assert (cold.cache_hit_share, cold.cache_label) == (None, "")
    assert "no prefix cache" in cold.reasons["cache_hit_share"]


def test_hits_prove_a_cache_whatever_the_server_says() -> None:
    records = counted(dict.fromkeys(STATES, 8), queries=0, prefix_caching=False)
    named = by_cell(records)
    assert named == {"cold": {"warm_prefix"}, "warm": {"cache_state"}, "prefix-50": {"cache_state"}}


def test_what_is_not_counted_is_not_warm() -> None:
    for records in (CLEAN, counted(dict.fromkeys(STATES), queries=None)):
        assert by_cell(records) == {"warm": {"cache_state"}, "prefix-50": {"cache_state"}}
        row = compute(records).cell(cell("warm").id)
        assert (row.cache_hit_share, row.cache_label) == (None, "warm prompts, cache not counted")
        assert "does not count" in row.reasons["cache_hit_share"]
        cold = compute(records).cell(cell("cold").id)
        assert "cache_hit_share" not in cold.reasons
        # As such rows were sealed before there was the axis.
        assert not {"cache", "cache_hit_share"} & set(cold.model_dump())
        assert {"cache", "cache_hit_share"} <= set(row.model_dump())


def test_one_server_that_does_not_count_leaves_the_share_unknown() -> None:
    good = counted({"cold": 0, "warm": 512 * REQUESTS, "prefix-50": 256 * REQUESTS})
    first = good.servers[0]
    partly = replace(good, servers=(first.model_copy(update={"windows": ()}), *good.servers[1:]))
    arm = first.arm
    assert compute(partly).cell(cell("warm", arm).id).cache_hit_share is None
    assert compute(partly).cell(cell("cold", arm).id).cache_hit_share is None
    named = [f for f in found(partly) if f.rule == "cache_state"]
    assert {f.cell_id for f in named} == {cell("warm", arm).id, cell("prefix-50", arm).id}
    gone = replace(good, servers=good.servers[1:])
    assert {f.cell_id for f in found(gone) if f.rule == "cache_state"} == {
        cell("warm", arm).id,
        cell("prefix-50", arm).id,
    }


def test_totals_of_a_server_are_judged_only_where_no_cell_was_counted() -> None:
    good = counted({"cold": 0, "warm": 512 * REQUESTS, "prefix-50": 256 * REQUESTS})
    grown = {"counters_before": {}, "counters_after": {"prefix_cache_hits": 9.0}}
    assert found(replace(good, servers=every_server(good, **grown))) == []
    bare = replace(CLEAN, servers=every_server(CLEAN, **grown))
    assert "warm_prefix" in {f.rule for f in found(bare)}
    drafts_only = (CounterWindow(cell_id=cell("cold").id, generation_tokens=1),)
    windowed = replace(CLEAN, servers=every_server(CLEAN, **grown, windows=drafts_only))
    assert "warm_prefix" in {f.rule for f in found(windowed)}


def test_a_warm_cell_may_send_its_prompts_before_and_a_prefix_cell_may_not() -> None:
    good = counted({"cold": 0, "warm": 512 * REQUESTS, "prefix-50": 256 * REQUESTS})
    for state, named in (
        ("warm", set()),
        ("prefix-50", {"warm_prompt"}),
        ("cold", {"warm_prompt"}),
    ):
        primed = a_request(cell(state), index=1).model_copy(
            update={"warmup": True, "request_id": "p1"}
        )
        records = replace(good, requests=(primed, *good.requests))
        assert {f.rule for f in found(records)} == named


def test_what_fills_the_cache_is_no_round_of_the_warm_up() -> None:
    spec = scenario(axes=AXES, base=BASE, workload={"requests": REQUESTS, "warmup_rounds": 3})
    run = a_run(spec)
    warm = cell_of(make_records(run), "vk", "none", cache="warm")
    cold = cell_of(make_records(run), "vk", "none", cache="cold")
    from finalbench.validity.warmup import check_steady

    for chosen, steady in ((warm, True), (cold, False)):
        rounds = [
            a_request(chosen, index=i, warmup=True, start_ns=10**9 * (i + 1)) for i in range(3)
        ]
        primes = [
            a_request(chosen, index=i, start_ns=10**9 * (10 + i), step_ms=20.0 * (i + 1))
            for i in range(REQUESTS)
        ]
        primes = [p.model_copy(update={"warmup": True}) for p in primes]
        requests = [a_request(chosen, index=i, start_ns=10**9 * (20 + i)) for i in range(REQUESTS)]
        faults = list(check_steady(run, chosen, [*rounds, *primes, *requests]))
        assert (faults == []) is steady


def test_the_report_shows_what_prompts_met(tmp_path: Path) -> None:
    good = counted({"cold": 0, "warm": 512 * REQUESTS, "prefix-50": 256 * REQUESTS})
    path = write_run(tmp_path / "run", good)
    analysis = analyse(path)
    assert {(r.cell.cache, r.label.endswith("from the cache")) for r in analysis.rows} == {
        ("cold", False),
        ("warm", True),
        ("prefix-50", True),
    }
    told = {c["id"]: (c["cache"], c["cache_hit_share"]) for c in summary(analysis)["cells"]}
    assert told[cell("warm").id] == ("warm", 1.0)
    assert {s.axis for s in analysis.spread} == {"cache"}
    table = cells_table(RunView(good, analysis).cells())
    at = [column.key for column in table.columns].index("cache")
    assert {row[at].text for row in table.rows} == {
        "cold",
        "warm prompts, 100% from the cache",
        "prefix-50 prompts, 50% from the cache",
    }
    cold = [c for c in RunView(good, analysis).cells() if c.cache == "cold"]
    assert "cache" not in [column.key for column in cells_table(cold).columns]
    # A warm row is ranked with cold ones nowhere.
    for board in leaderboard([analysis]):
        assert {row.row.cell.cache for row in board.rows} == {"cold"}


@pytest.mark.parametrize(
    ("updates", "words"),
    [
        ({"axes": {**AXES, "cache": ("hot",)}}, "cache"),
        ({"axes": {**AXES, "cache": ("prefix-0",)}}, "cache"),
        ({"axes": {**AXES, "cache": ("prefix-100",)}}, "cache"),
        ({"axes": {**AXES, "cache": ("warm",)}}, "base.cache: 'cold' is not in axes.cache"),
        ({"axes": {**AXES, "cache": ("cold", "cold")}}, "axes.cache: values repeat"),
        ({"workload": {"requests": 4, "warmup_requests": 0}}, "axes.cache: a prefix is put"),
    ],
)
def test_a_state_that_cannot_be_is_refused(updates: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        scenario(**{"axes": AXES, "base": BASE, **updates})


def test_a_base_that_is_not_cold_is_another_scenario() -> None:
    warm = scenario(axes=AXES, base={**BASE, "cache": "warm"})
    assert warm.hash() != SPEC.hash()
    full = make_plan(scenario(axes=AXES, base=BASE, grid="full"))
    assert {c.cache for c in full.cells} == set(STATES)
    assert SPEC.hash() != scenario(axes={**AXES, "cache": ("cold",)}, base=BASE).hash()


def test_peers_are_started_with_their_cache_where_a_cell_is_about_it() -> None:
    plan = make_plan(scenario(axes=AXES, base=BASE, arms=("vk", "vllm", "sglang", "stock")))
    started = {
        (c.arm, c.cache): " ".join(
            serve_command(["x"], plan.servers[c.server_key], host="h", port=1, name="n")
        )
        for c in plan.cells
    }
    assert "--no-enable-prefix-caching" in started["vllm", "cold"]
    assert " --enable-prefix-caching" in started["vllm", "warm"]
    assert "--disable-radix-cache" in started["sglang", "cold"]
    assert "--disable-radix-cache" not in started["sglang", "prefix-50"]
    # Engines without such an option serve all states with one process.
    assert started["vk", "cold"] == started["vk", "warm"]
