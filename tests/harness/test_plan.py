"""Plans: pure, with stable ids, balanced orders, and a partner for every cell."""

from __future__ import annotations

import random

import pytest

from finalbench.errors import UsageError
from finalbench.plan import Cell, make_plan, unequal_settings
from finalbench.scenario import Scenario, load_scenario, parse_override, scenario_files


def scenario(*overrides: str, name: str = "vk-tiny") -> Scenario:
    return load_scenario(name, [parse_override(text) for text in overrides])


def test_the_same_scenario_gives_the_same_plan() -> None:
    random.seed(1)
    first = make_plan(scenario())
    random.seed(2)
    assert make_plan(scenario()) == first


def test_ids_are_stable_under_what_does_not_concern_the_cell() -> None:
    base = {c.id for c in make_plan(scenario()).cells}
    assert {c.id for c in make_plan(scenario("grid=full")).cells} >= base
    assert {c.id for c in make_plan(scenario("measure.blocks=9")).cells} == base
    assert {c.id for c in make_plan(scenario("model.path=/elsewhere")).cells} == base


@pytest.mark.parametrize(
    "override", ["serving.threads=7", "workload.seed=9", "samplings.greedy.top_k=1"]
)
def test_ids_change_with_what_is_measured(override: str) -> None:
    base = {c.id for c in make_plan(scenario("axes.sampling=[greedy]")).cells}
    assert not base & {c.id for c in make_plan(scenario("axes.sampling=[greedy]", override)).cells}


@pytest.mark.parametrize("grid", ["star", "full"])
def test_every_cell_has_its_baseline_and_its_undrafted_twin(grid: str) -> None:
    plan = make_plan(scenario(f"grid={grid}"))

    def partners(cell: Cell, arm: str) -> list[Cell]:
        found = [c for c in plan.cells if c.arm == arm and c.pair_key == cell.pair_key]
        return [c for c in found if c.draft.method == "none"]

    for cell in plan.cells:
        assert len(partners(cell, "stock")) == 1, cell.label
        assert len(partners(cell, cell.arm)) == 1, cell.label
        for partner in partners(cell, "stock"):
            assert (partner.seq_len, partner.sampling) == (cell.seq_len, cell.sampling)
            assert partner.requests == cell.requests


@pytest.mark.parametrize("name", ["vk-tiny", "qwen35-35b-a3b", "gemma4-e4b"])
def test_star_covers_every_axis_value_and_stock_has_no_draft_axis(name: str) -> None:
    chosen = scenario(name=name)
    plan = make_plan(chosen)
    vk = [c for c in plan.cells if c.arm == "vk"]
    assert {c.seq_len for c in vk} == set(chosen.axes.seq_len)
    assert {c.sampling.name for c in vk} == set(chosen.axes.sampling)
    assert {c.draft.label for c in vk} == set(chosen.axes.draft)
    assert [c.axis for c in vk].count("base") == 1
    assert {c.draft.method for c in plan.cells if c.arm == "stock"} == {"none"}
    assert len({c.id for c in plan.cells}) == len(plan.cells)


def test_full_grid_is_the_product() -> None:
    plan = make_plan(scenario("grid=full"))
    assert sum(c.arm == "vk" for c in plan.cells) == 3 * 2 * 5
    assert sum(c.arm == "stock" for c in plan.cells) == 3 * 2


@pytest.mark.parametrize("order", ["abba", "shuffled"])
@pytest.mark.parametrize("blocks", [2, 4, 6])
def test_orders_are_balanced(order: str, blocks: int) -> None:
    plan = make_plan(scenario(f"measure.order={order}", f"measure.blocks={blocks}"))
    first = [block.order[0] for block in plan.blocks]
    assert {first.count(key) for key in plan.servers} == {blocks // 2}
    for block in plan.blocks:
        assert sorted(block.order) == sorted(plan.servers)


def test_each_block_holds_every_cell_once_in_an_order_of_its_own() -> None:
    plan = make_plan(scenario())
    for block in plan.blocks:
        ids = [cell_id for cells in block.cells.values() for cell_id in cells]
        assert sorted(ids) == sorted(c.id for c in plan.cells)
    key = plan.cells[0].server_key
    assert len({block.cells[key] for block in plan.blocks}) > 1


def test_drafts_and_samplings_share_one_server() -> None:
    plan = make_plan(scenario("grid=full"))
    assert len({c.server_key for c in plan.cells if c.arm == "vk"}) == 1


def test_concurrency_gets_as_many_requests_as_streams() -> None:
    plan = make_plan(scenario("axes.concurrency=[1,4]", "workload.requests=2"))
    assert {c.requests for c in plan.cells if c.concurrency == 4} == {4}


def test_seed_changes_the_order_of_cells_only() -> None:
    one, two = make_plan(scenario()), make_plan(scenario("measure.seed=2"))
    assert [c.id for c in one.cells] == [c.id for c in two.cells]
    assert one.blocks != two.blocks and one.hash != two.hash


def test_estimate_grows_with_blocks() -> None:
    one, three = make_plan(scenario("measure.blocks=1")), make_plan(scenario())
    assert three.estimate_s == pytest.approx(3 * one.estimate_s, abs=0.2)
    assert three.estimate_s < 360


@pytest.mark.parametrize("name", scenario_files())
def test_c03_compared_servers_are_planned_alike(name: str) -> None:
    """A recipe that sizes one arm otherwise, or gives it other weights, is named."""
    plan = make_plan(load_scenario(name))
    assert unequal_settings(plan) == []
    first, second = list(plan.servers)[:2]
    for setting, value in (("max_sequences", 99), ("weights", "random:5"), ("dtype", "float64")):
        servers = {**plan.servers, second: {**plan.servers[second], setting: value}}
        (fault,) = unequal_settings(plan.model_copy(update={"servers": servers}))
        assert fault.startswith(f"{setting} is not planned alike: ")
        assert f"{value!r} for {second}" in fault and first in fault
    # What tells arms apart may differ.
    servers = {**plan.servers, second: {**plan.servers[second], "profile": "x", "draft": "mtp3"}}
    assert unequal_settings(plan.model_copy(update={"servers": servers})) == []


def test_a_slow_arm_takes_part_in_the_short_cells_alone() -> None:
    sizes = ("axes.output_len=[16,64]", "base.output_len=16")
    whole = make_plan(scenario(*sizes)).cells
    cut = make_plan(scenario(*sizes, "output_limits.stock=16")).cells
    assert [c for c in whole if c.arm != "stock" or c.output_len <= 16] == list(cut)
    assert any(c.arm == "vk" and c.output_len == 64 for c in cut)
    with pytest.raises(UsageError, match="no cell is left"):
        scenario(*sizes, "output_limits.stock=8")
    with pytest.raises(UsageError, match="not among arms"):
        scenario(*sizes, "output_limits.vllm=16")
