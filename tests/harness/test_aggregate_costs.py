"""Draft costs that explain the gain, and energy of the measured windows only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from run_records import MS, a_request, a_run, cell_of, edit, make_records, scenario

from finalbench.aggregate import analyse
from finalbench.aggregate.energy import energy_j, energy_row, energy_table, merged
from finalbench.record import TelemetryRecord
from finalbench.stats import Verdict

S = 1_000_000_000
CLEAN = make_records()
PLAIN = cell_of(CLEAN, "vk", "none")


def test_s07_the_gain_follows_from_acceptance_and_cost() -> None:
    """Drafted rounds that cost 1.5 plain steps: the gain is acceptance over cost within 2 %."""
    axes = {
        "seq_len": (128,),
        "output_len": (320,),
        "sampling": ("greedy",),
        "draft": ("none", "mtp3"),
    }
    base = {"seq_len": 128, "output_len": 320, "sampling": "greedy", "draft": "mtp3"}
    records = make_records(
        a_run(scenario(axes=axes, base=base)), step_ms={"vk": 10.0, "stock": 20.0}
    )
    cell = cell_of(records, "vk", "mtp3", seq_len=128, output_len=320)
    slower = tuple(
        a_request(cell, block=r.block, index=r.prompt_index, start_ns=r.sent_ns, step_ms=7.5)
        if r.cell_id == cell.id
        else r
        for r in records.requests
    )
    plain = cell_of(records, "vk", "none", seq_len=128, output_len=320)
    slower = tuple(
        a_request(plain, block=r.block, index=r.prompt_index, start_ns=r.sent_ns, step_ms=5.0)
        if r.cell_id == plain.id
        else r
        for r in slower
    )
    found = analyse(replace(records, requests=slower)).draft_costs
    assert [c.cell_id for c in found] == [cell.id]
    cost = found[0]
    assert cost.step_s == pytest.approx(0.005)
    assert cost.round_s == pytest.approx(0.0075)
    assert cost.cost == pytest.approx(1.5)
    assert cost.expected_gain == pytest.approx(cost.acceptance_length / 1.5)
    assert cost.gain == pytest.approx(cost.expected_gain, rel=0.02)
    assert cost.gain_interval is not None
    assert cost.gain_interval[0] <= cost.gain * 1.001
    assert cost.gain_interval[1] >= cost.gain * 0.999
    assert cost.verdict is Verdict.FASTER
    assert cost.gain <= cost.expected_gain * (1 + 1e-9)


def test_costs_leave_invalid_cells_out() -> None:
    drafting = cell_of(CLEAN, "vk", "mtp3")
    every = {c.cell_id for c in analyse(CLEAN).draft_costs}
    broken = analyse(edit(CLEAN, lambda r: r.cell_id == drafting.id, done_seen=False))
    assert {c.cell_id for c in broken.draft_costs} == every - {drafting.id}
    untwinned = analyse(edit(CLEAN, lambda r: r.cell_id == PLAIN.id, done_seen=False))
    assert drafting.id not in {c.cell_id for c in untwinned.draft_costs}


def test_energy_of_a_window_by_hand() -> None:
    # 100 W rising to 300 W over 10 s: from 2 s to 7 s it is 140 to 240 W, 950 J.
    samples = [(0, 100.0), (5 * S, 200.0), (10 * S, 300.0)]
    assert energy_j(samples, (2 * S, 7 * S)) == pytest.approx(950.0)
    assert energy_j(samples, (0, 10 * S)) == pytest.approx(2_000.0)
    assert energy_j(samples, (-5 * S, 0)) == pytest.approx(500.0)
    assert energy_j(samples, (10 * S, 12 * S)) == pytest.approx(600.0)


def test_windows_are_joined() -> None:
    assert merged([(5, 8), (0, 3), (2, 4), (8, 9)]) == [(0, 4), (5, 9)]
    assert merged([(0, 9), (2, 3)]) == [(0, 9)]
    assert merged([]) == []


def test_p01_p03_start_and_idle_power_do_not_enter() -> None:
    """720 W while busy, 440 W on average with the start: the busy figure comes out within 0.5 %."""
    request = a_request(PLAIN, start_ns=100 * S, ttft_ms=0.0, step_ms=1_000.0, sizes=[1] * 31)
    rows = []
    for load_s in (50, 500):
        samples = [(at * S, 300.0) for at in range(-load_s, 99)]
        samples += [(99 * S + i * S // 10, 720.0) for i in range(330)]
        rows.append(energy_row("vk", [request], samples))
    for row in rows:
        assert row.seconds == pytest.approx(30.0)
        assert row.joules == pytest.approx(720 * 30, rel=0.005)
        assert row.joules_per_token == pytest.approx(720 * 30 / 31, rel=0.005)
        assert row.tokens == 31
    assert rows[0].joules_per_token == rows[1].joules_per_token


def test_energy_is_null_with_a_reason() -> None:
    request = a_request(PLAIN, start_ns=100 * S)
    assert energy_row("vk", [request], []).reason == "no power sensor was read"
    few = energy_row("vk", [request], [(100 * S, 700.0), (200 * S, 700.0)])
    assert few.reason == "1 power samples while busy; 10 are needed"
    assert few.joules is None
    dense = [(100 * S + i * MS, 700.0) for i in range(600)]
    lost = request.model_copy(update={"status": "failed", "error": "x"})
    assert energy_row("vk", [lost], dense).reason == "no valid request"
    assert [r.reason for r in energy_table(CLEAN)] == ["no power sensor was read"] * 2
    telemetry = tuple(
        TelemetryRecord(utc="", t_ns=at, values={"gpu_power_w": power}) for at, power in dense
    )
    first = min(r.sent_ns for r in CLEAN.requests)
    near = tuple(t.model_copy(update={"t_ns": t.t_ns - 100 * S + first}) for t in telemetry)
    arm = next(r.arm for r in CLEAN.requests if r.sent_ns == first)
    found = {r.arm: r for r in energy_table(replace(CLEAN, telemetry=near))}
    assert found[arm].joules is not None
