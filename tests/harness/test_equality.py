"""Equality from the timed requests: drafts on against off, engine against stock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from run_records import a_run, a_score, cell_of, edit, make_records, scenario

from finalbench.equality import (
    EqualityRow,
    class_of,
    diverges,
    first_difference,
    judge,
    stock_self_rate,
    tie_bound,
)
from finalbench.record import RunRecords, ScorePosition, ScoreRecord

CLEAN = make_records()


def row(records: RunRecords, cell_id: str, kind: str) -> EqualityRow:
    return next(r for r in judge(records) if r.cell_id == cell_id and r.kind == kind)


def position(token: int, *, gap: float = 0.0, other: int = 7, unit: str = "logit") -> ScorePosition:
    """An engine token that lies `gap` below stock's choice; 0 makes it the choice itself."""
    own, best = (9.0, 9.0 + gap) if unit == "logit" else (-1.0 - gap, -1.0)
    top = ((other, best), (token, own)) if gap else ((token, own), (other, own - 4))
    return ScorePosition(
        token=token,
        logit=own if unit == "logit" else None,
        logprob=-1.0 - gap,
        rank=2 if gap else 1,
        top=top,
    )


def scored(records: RunRecords, cell_id: str, edits: dict[int, float], **how: Any) -> RunRecords:
    """The first request of the cell, with the given gaps at the given positions."""
    first = next(r for r in records.requests if r.cell_id == cell_id)
    changed: list[ScoreRecord] = []
    for score in records.scores:
        if score.request_id == first.request_id:
            positions = list(score.positions)
            for at, gap in edits.items():
                positions[at] = position(positions[at].token, gap=gap, **how)
            score = score.model_copy(update={"positions": tuple(positions)})
        changed.append(score)
    return replace(records, scores=tuple(changed))


def test_a_clean_run_is_identical_and_judges_every_position() -> None:
    for found in judge(CLEAN):
        sampled = CLEAN.run.plan.cell(found.cell_id).sampling.name == "t07"
        if found.kind == "stock" and sampled:
            assert found.result == "not_applicable"
            assert found.reason == "sampled: no single right token"
            continue
        assert found.result == "identical", found
        assert found.prompts == 16
        assert found.positions == 16 * 32
        assert found.first is None
    kinds = {(r.kind, r.cell_id) for r in judge(CLEAN)}
    drafted = {c.id for c in CLEAN.run.plan.cells if c.draft.method != "none"}
    engine = {c.id for c in CLEAN.run.plan.cells if c.arm == "vk"}
    assert {c for k, c in kinds if k == "drafts"} == drafted
    assert {c for k, c in kinds if k == "stock"} == engine


def test_s01_one_flipped_token_with_drafts_on_is_divergent() -> None:
    cell = cell_of(CLEAN, "vk", "mtp3")
    victim = next(r for r in CLEAN.requests if r.cell_id == cell.id and r.block == 2)
    tokens = list(victim.token_ids)
    tokens[11] ^= 1
    broken = edit(CLEAN, lambda r: r is victim, token_ids=tuple(tokens))
    found = row(broken, cell.id, "drafts")
    assert found.result == "divergent"
    assert found.divergent_prompts == 1
    assert found.first is not None
    assert (found.first.position, found.first.common_prefix) == (11, 11)
    assert (found.first.got, found.first.expected) == (tokens[11], victim.token_ids[11])
    assert (found.first.block, found.first.prompt_index) == (2, victim.prompt_index)
    assert found.longest_common_prefix == 11
    assert found.reason == "1 of 16 outputs differ from those without drafts"
    assert diverges(judge(broken))
    assert not diverges(judge(CLEAN))
    assert class_of(judge(broken), cell.id)[0] == "divergent"


def test_sampled_cells_are_proven_too_when_the_seed_is_known() -> None:
    cell = cell_of(CLEAN, "vk", "mtp3", sampling="t07")
    assert row(CLEAN, cell.id, "drafts").result == "identical"
    flipped = edit(CLEAN, lambda r: r.cell_id == cell.id, token_ids=(1, 2, 3))
    assert row(flipped, cell.id, "drafts").result == "divergent"
    assert class_of(judge(flipped), cell.id)[0] == "divergent"
    assert class_of(judge(CLEAN), cell.id)[0] == "not_applicable"
    unseeded = edit(CLEAN, lambda r: r.cell_id == cell.id, seed=None)
    found = row(unseeded, cell.id, "drafts")
    assert (found.result, found.reason) == ("not_judged", "sampled without a known seed")
    assert class_of(judge(unseeded), cell.id)[0] == "not_judged"


def test_an_output_that_stops_early_differs_where_it_ends() -> None:
    cell = cell_of(CLEAN, "vk", "mtp3")
    victim = next(r for r in CLEAN.requests if r.cell_id == cell.id)
    short = edit(CLEAN, lambda r: r is victim, token_ids=victim.token_ids[:20])
    first = row(short, cell.id, "drafts").first
    assert first is not None
    assert (first.position, first.got, first.expected) == (20, None, victim.token_ids[20])


def test_a_missing_counterpart_is_not_passed_over() -> None:
    cell, twin = cell_of(CLEAN, "vk", "mtp3"), cell_of(CLEAN, "vk", "none")
    lost = edit(
        CLEAN, lambda r: r.cell_id == twin.id and r.prompt_index == 3, status="failed", error="x"
    )
    found = row(lost, cell.id, "drafts")
    assert (found.result, found.unpaired, found.prompts) == ("not_judged", 4, 12)
    assert found.reason == "4 of 16 outputs have no counterpart without drafts"
    gone = edit(CLEAN, lambda r: r.cell_id == twin.id, status="failed", error="x")
    assert row(gone, cell.id, "drafts").reason == "no valid output to compare"
    textual = edit(CLEAN, lambda r: r.cell_id == twin.id, token_ids=())
    assert row(textual, cell.id, "drafts").reason == "token ids were not served"


def test_drafts_without_an_undrafted_cell_cannot_be_judged() -> None:
    axes = {"seq_len": (128,), "output_len": (32,), "sampling": ("greedy",), "draft": ("mtp3",)}
    base = {"seq_len": 128, "output_len": 32, "sampling": "greedy", "draft": "mtp3"}
    records = make_records(a_run(scenario(axes=axes, base=base)))
    cell = cell_of(records, "vk", "mtp3", seq_len=128)
    assert row(records, cell.id, "drafts").reason == "the plan has no cell without drafts"


@pytest.mark.parametrize(
    ("gap", "result"),
    [(0.0, "identical"), (0.0009, "ties"), (0.001, "ties"), (0.0011, "divergent")],
)
def test_s02_ties_are_told_from_wrong_tokens(gap: float, result: str) -> None:
    """Gaps around the bound of fp32, exactly on it included (the sum 9 + 0.001 is rounded)."""
    cell = cell_of(CLEAN, "vk", "mtp3")
    edited = scored(CLEAN, cell.id, {5: min(gap, 0.001 - 1e-12) if gap == 0.001 else gap})
    found = row(edited, cell.id, "stock")
    assert found.result == result
    assert found.tie_bound == 1e-3
    if result == "ties":
        assert found.label == "ties(1)"
        assert found.largest_gap == pytest.approx(gap, abs=1e-9)
    if result == "divergent":
        assert found.first is not None
        assert (found.first.position, found.first.expected) == (5, 7)
        assert found.first.gap == pytest.approx(gap, rel=1e-6)


def test_every_position_is_judged_after_a_divergence_too() -> None:
    cell = cell_of(CLEAN, "vk", "mtp3")
    edited = scored(CLEAN, cell.id, {3: 2.0, 9: 0.0005, 12: 3.0})
    found = row(edited, cell.id, "stock")
    assert found.result == "divergent"
    assert found.positions == 16 * 32
    assert found.ties == 1
    assert found.divergent_prompts == 1
    assert found.first is not None and found.first.position == 3
    assert found.longest_common_prefix == 3
    assert found.largest_gap == pytest.approx(3.0)


def test_log_probabilities_serve_as_well_as_logits() -> None:
    cell = cell_of(CLEAN, "vk", "mtp3")
    assert row(scored(CLEAN, cell.id, {5: 0.0005}, unit="logprob"), cell.id, "stock").label == (
        "ties(1)"
    )
    assert row(scored(CLEAN, cell.id, {5: 0.5}, unit="logprob"), cell.id, "stock").result == (
        "divergent"
    )


def test_the_tie_bound_follows_the_scoring_servers_type() -> None:
    assert (tie_bound("float32"), tie_bound("bfloat16"), tie_bound("float8")) == (1e-3, 0.25, 1e-3)
    cell = cell_of(CLEAN, "vk", "mtp3")
    servers = tuple(
        s.model_copy(update={"settings": {**(s.settings or {}), "dtype": "bfloat16"}})
        for s in CLEAN.servers
    )
    edited = replace(scored(CLEAN, cell.id, {5: 0.2}), servers=servers)
    assert row(edited, cell.id, "stock").label == "ties(1)"
    assert row(scored(CLEAN, cell.id, {5: 0.2}), cell.id, "stock").result == "divergent"


def test_scores_for_other_tokens_prove_nothing() -> None:
    cell = cell_of(CLEAN, "vk", "mtp3")
    first = next(r for r in CLEAN.requests if r.cell_id == cell.id)
    others = tuple(
        s.model_copy(update={"positions": s.positions[:-1]})
        if s.request_id == first.request_id
        else s
        for s in CLEAN.scores
    )
    found = row(replace(CLEAN, scores=others), cell.id, "stock")
    assert found.result == "not_judged"
    assert found.reason == f"the scores of request {first.request_id} are for other tokens"


def test_without_scores_only_equal_outputs_are_proven() -> None:
    cell, stock = cell_of(CLEAN, "vk", "mtp3"), cell_of(CLEAN, "stock")
    bare = replace(CLEAN, scores=())
    found = row(bare, cell.id, "stock")
    assert (found.result, found.same_outputs) == ("identical", 16)
    assert found.reason == "by stock's own timed outputs; not scored"
    other = edit(bare, lambda r: r.cell_id == stock.id and r.prompt_index == 0, token_ids=(1, 2))
    found = row(other, cell.id, "stock")
    assert (found.result, found.same_outputs) == ("not_judged", 12)
    assert found.reason == "16 of 16 outputs were not scored by stock"


def test_penalties_and_synthetic_acceptance_are_not_applicable() -> None:
    penalised = scenario(
        samplings={
            "greedy": {"name": "greedy", "repetition_penalty": 1.1},
            "t07": {"name": "t07", "temperature": 0.7},
        }
    )
    records = make_records(a_run(penalised))
    cell = cell_of(records, "vk", "mtp3")
    assert row(records, cell.id, "stock").reason == "penalties change the logits"
    synthetic = scenario(drafts={"none": {}, "mtp3": {"method": "mtp", "k": 3, "acceptance": 0.8}})
    records = make_records(a_run(synthetic))
    cell = next(c for c in records.run.plan.cells if c.axis == "base" and c.arm == "vk")
    for kind in ("drafts", "stock"):
        found = row(records, cell.id, kind)
        assert found.result == "not_applicable"
        assert found.reason == "synthetic acceptance changes tokens"


def test_stock_against_itself() -> None:
    stock = cell_of(CLEAN, "stock")
    outputs = [r for r in CLEAN.requests if r.cell_id == stock.id]
    assert stock_self_rate(outputs, {}) == (0.0, "per output, repeats in other blocks")
    changed = [r.model_copy(update={"token_ids": (1, 2)}) if r.block == 3 else r for r in outputs]
    # Four prompts, three repeats each: those of block 3 differ.
    assert stock_self_rate(changed, {})[0] == pytest.approx(4 / 12)
    own = {r.request_id: a_score(r) for r in outputs}
    assert stock_self_rate(outputs, own) == (0.0, "per position, own scoring")
    first = own[outputs[0].request_id]
    odd = first.model_copy(update={"positions": (position(1, gap=0.1), *first.positions[1:])})
    own[outputs[0].request_id] = odd
    assert stock_self_rate(outputs, own)[0] == pytest.approx(1 / (16 * 32))
    assert stock_self_rate(outputs[:1], {}) == (None, None)
    cell = cell_of(CLEAN, "vk", "mtp3")
    assert row(CLEAN, cell.id, "stock").self_rate == 0.0


def test_first_difference() -> None:
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 9, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2
    assert first_difference((), (1,)) == 0


def test_class_of_a_cell_nobody_judged() -> None:
    assert class_of([], "x") == ("not_judged", "no stock arm judged this cell")


def with_dtype(records: RunRecords, arm: str, dtype: str | None) -> RunRecords:
    def change(settings: dict[str, Any]) -> dict[str, Any]:
        kept = {k: v for k, v in settings.items() if k != "dtype"}
        return kept if dtype is None else {**kept, "dtype": dtype}

    return replace(
        records,
        servers=tuple(
            s.model_copy(update={"settings": change(s.settings or {})}) if s.arm == arm else s
            for s in records.servers
        ),
    )


def test_the_tie_bound_is_inclusive_and_taken_from_the_scoring_arm_alone() -> None:
    cell = cell_of(CLEAN, "vk", "mtp3")
    at_bound = scored(CLEAN, cell.id, {5: 0.25})
    assert row(with_dtype(at_bound, "stock", "bfloat16"), cell.id, "stock").label == "ties(1)"
    assert row(with_dtype(at_bound, "stock", "float16"), cell.id, "stock").label == "ties(1)"
    beyond = scored(CLEAN, cell.id, {5: 0.26})
    assert row(with_dtype(beyond, "stock", "bfloat16"), cell.id, "stock").result == "divergent"
    assert row(with_dtype(beyond, "stock", "float16"), cell.id, "stock").result == "divergent"
    assert row(with_dtype(at_bound, "vk", "bfloat16"), cell.id, "stock").tie_bound == 1e-3
    unstated = with_dtype(at_bound, "stock", None)
    assert row(unstated, cell.id, "stock").tie_bound == 1e-3
    mute = replace(
        at_bound, servers=tuple(s.model_copy(update={"settings": None}) for s in CLEAN.servers)
    )
    assert row(mute, cell.id, "stock").tie_bound == 1e-3


def test_two_types_of_one_arm_fall_back_to_the_scenarios() -> None:
    cell = cell_of(CLEAN, "vk", "mtp3")
    mixed = tuple(
        s.model_copy(update={"settings": {**(s.settings or {}), "dtype": "bfloat16"}})
        if s.block == 0
        else s
        for s in CLEAN.servers
    )
    assert row(replace(CLEAN, servers=mixed), cell.id, "stock").tie_bound == 1e-3


def test_failed_requests_are_not_judged() -> None:
    cell = cell_of(CLEAN, "vk", "mtp3")
    garbage = edit(
        CLEAN,
        lambda r: r.cell_id == cell.id and r.prompt_index == 0,
        status="failed",
        error="cut",
        token_ids=(1, 2, 3),
    )
    drafts, stock = row(garbage, cell.id, "drafts"), row(garbage, cell.id, "stock")
    assert (drafts.result, drafts.prompts) == ("identical", 12)
    assert (stock.result, stock.prompts) == ("identical", 12)


def test_a_reference_that_ends_early_has_no_expected_token() -> None:
    cell, twin = cell_of(CLEAN, "vk", "mtp3"), cell_of(CLEAN, "vk", "none")
    victim = next(r for r in CLEAN.requests if r.cell_id == twin.id)
    short = edit(
        CLEAN,
        lambda r: r.cell_id == twin.id and r.prompt_index == victim.prompt_index,
        token_ids=victim.token_ids[:20],
    )
    first = row(short, cell.id, "drafts").first
    assert first is not None
    assert (first.position, first.expected, first.got) == (20, None, victim.token_ids[20])


def test_rows_name_their_reference_and_count_nothing_they_did_not_judge() -> None:
    cell, stock = cell_of(CLEAN, "vk", "mtp3"), cell_of(CLEAN, "stock")
    found = row(CLEAN, cell.id, "stock")
    assert found.against == stock.id
    assert (found.ties, found.divergent_prompts, found.unpaired, found.largest_gap) == (0, 0, 0, 0)
    sampled = row(CLEAN, cell_of(CLEAN, "vk", "mtp3", sampling="t07").id, "stock")
    counts = (
        sampled.prompts,
        sampled.positions,
        sampled.ties,
        sampled.divergent_prompts,
        sampled.unpaired,
    )
    assert counts == (0, 0, 0, 0, 0)
    alone = scenario(arms=("vk", "stock"))
    records = make_records(a_run(alone))
    plan = records.run.plan
    cut = plan.model_copy(update={"cells": tuple(c for c in plan.cells if c.arm == "vk")})
    lone = replace(records, run=records.run.model_copy(update={"plan": cut}))
    assert row(lone, cell.id, "stock").against == "stock"
    assert row(lone, cell.id, "stock").same_outputs is None


def test_reasons_are_given_for_findings_only() -> None:
    cell = cell_of(CLEAN, "vk", "mtp3")
    assert row(CLEAN, cell.id, "stock").reason is None
    assert row(scored(CLEAN, cell.id, {1: 0.0005}), cell.id, "stock").reason is None
    found = row(scored(CLEAN, cell.id, {1: 2.0}), cell.id, "stock")
    assert found.reason == "1 of 16 outputs hold a token stock would not choose"


@pytest.mark.parametrize(
    "change",
    [
        {"status": "failed", "error": "cut", "token_ids": (1, 2)},
        {"token_ids": ()},
    ],
)
def test_stocks_own_failures_are_left_out(change: dict[str, Any]) -> None:
    """Neither a cut output of stock nor one without ids stands for what stock says."""
    cell, stock = cell_of(CLEAN, "vk", "mtp3"), cell_of(CLEAN, "stock")
    partly = edit(CLEAN, lambda r: r.cell_id == stock.id and r.block == 3, **change)
    assert row(partly, cell.id, "stock").same_outputs == 16
    outputs = [r for r in partly.requests if r.cell_id == stock.id]
    assert stock_self_rate(outputs, {}) == (0.0, "per output, repeats in other blocks")
    scores = {
        r.request_id: ScoreRecord(
            **{**a_score(r).model_dump(), "positions": (position(1, gap=1.0),)}
        )
        for r in outputs
        if r.block == 3
    }
    assert stock_self_rate(outputs, scores)[0] == 0.0
