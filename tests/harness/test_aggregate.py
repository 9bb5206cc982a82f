"""From a run folder to headline, boards, spread and the document of `run --json`."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_records import a_run, cell_of, edit, make_records, scenario, write_run

from finalbench.aggregate import Analysis, Marks, analyse, compare, leaderboard, summary
from finalbench.bundle import seal
from finalbench.errors import BundleBroken
from finalbench.metrics import compute
from finalbench.record import BareBlock, BareLoop, BareTurn, Classes, RunRecords
from finalbench.stats import Verdict

CLEAN = make_records()
ANALYSIS = analyse(CLEAN)


def as_random(records: RunRecords) -> RunRecords:
    run = records.run.model_copy(
        update={"classes": Classes(weights="random", acceptance="measured")}
    )
    servers = tuple(
        s.model_copy(
            update={
                name: {**(getattr(s, name) or {}), "weights": "random:1"}
                for name in ("settings", "settings_after")
            }
        )
        for s in records.servers
    )
    return replace(records, run=run, servers=servers)


def test_headline_is_the_declared_base_cell_against_its_baseline() -> None:
    head = ANALYSIS.headline
    base = cell_of(CLEAN, "vk", "mtp3")
    assert (head.arm, head.against, head.cell_id) == ("vk", "stock", base.id)
    # Steps of 5 and 20 ms, 31 tokens in 13 rounds: 4 x 31 / 13.
    assert head.ratio == pytest.approx(4 * 31 / 13, rel=0.01)
    assert head.ratio_interval is not None
    assert head.ratio_interval[0] < 4 * 31 / 13 < head.ratio_interval[1]
    assert head.verdict is Verdict.FASTER
    assert head.equality == "identical"
    assert head.acceptance_length == pytest.approx(1 + 18 / 13)
    assert (head.weights, head.acceptance, head.blocks) == ("real", "measured", 4)
    assert head.bandwidth_share is None
    assert head.reasons == {"bandwidth_share": "not stated"}
    assert head.decode_tok_s is not None and head.against_decode_tok_s is not None
    assert head.decode_tok_s / head.against_decode_tok_s == pytest.approx(head.ratio, rel=0.01)


def test_the_headline_is_not_the_best_cell() -> None:
    """A draft setting twice as fast as the base does not become the headline."""
    drafts = {"none": {}, "mtp3": {"method": "mtp", "k": 3}, "mtp1": {"method": "mtp", "k": 1}}
    axes = {
        "seq_len": (128,),
        "output_len": (32,),
        "sampling": ("greedy",),
        "draft": ("none", "mtp1", "mtp3"),
    }
    base = {"seq_len": 128, "output_len": 32, "sampling": "greedy", "draft": "none"}
    found = analyse(make_records(a_run(scenario(drafts=drafts, axes=axes, base=base))))
    rates = [r.value or 0 for r in found.rows if r.cell.arm == "vk"]
    assert found.headline.decode_tok_s == pytest.approx(min(rates))


def test_an_invalid_cell_has_no_headline_number() -> None:
    base = cell_of(CLEAN, "vk", "mtp3")
    found = analyse(edit(CLEAN, lambda r: r.cell_id == base.id and r.block == 0, done_seen=False))
    head = found.headline
    assert head.decode_tok_s is None
    assert head.ratio is None
    assert head.verdict is Verdict.INCONCLUSIVE
    assert head.reasons["ratio"] == "vk cell is invalid: failures"
    assert head.reasons["decode_tok_s"].startswith("invalid: failures: 4 of 16 requests failed")
    other = next(r for r in found.rows if r.cell.id != base.id and r.cell.arm == "vk")
    assert other.valid
    assert other.comparison is not None and other.comparison.ratio is not None


def test_a_fault_of_the_whole_run_invalidates_every_row() -> None:
    servers = tuple(
        s.model_copy(
            update={
                name: {**(getattr(s, name) or {}), "threads": 2 if s.arm == "stock" else 8}
                for name in ("settings", "settings_after")
            }
        )
        for s in CLEAN.servers
    )
    found = analyse(replace(CLEAN, servers=servers))
    assert not any(r.valid for r in found.rows)
    assert found.headline.reasons["ratio"] == "vk cell is invalid: settings_differ"
    assert all(b.position is None for board in leaderboard([found]) for b in board.rows)


def test_t09_w08_unequal_token_sources_or_text_are_not_compared() -> None:
    table = compute(CLEAN)
    mine = table.cell(cell_of(CLEAN, "vk", "mtp3").id)
    theirs = table.cell(cell_of(CLEAN, "stock").id)
    assert compare(mine, theirs).ratio is not None
    by_usage = theirs.model_copy(update={"token_source": "usage"})
    assert compare(mine, by_usage).reason == "token sources differ: ids against usage"
    random_text = theirs.model_copy(update={"text_class": "random"})
    refused = compare(mine, random_text)
    assert refused.reason == "text classes differ: natural against random"
    assert refused.ratio is None
    apart = theirs.model_copy(update={"blocks": theirs.blocks[:2]})
    late = mine.model_copy(update={"blocks": mine.blocks[2:]})
    assert compare(late, apart).reason == "no block has both arms"
    why = {"decode_tok_s": "no valid request"}
    empty = theirs.model_copy(update={"blocks": (), "reasons": why})
    assert compare(mine, empty).reason == "stock has no decode_tok_s: no valid request"


def test_pairs_use_common_blocks_and_slots() -> None:
    table = compute(CLEAN)
    mine = table.cell(cell_of(CLEAN, "vk", "mtp3").id)
    theirs = table.cell(cell_of(CLEAN, "stock").id)
    three = theirs.model_copy(update={"blocks": theirs.blocks[1:]})
    found = compare(mine, three)
    assert [p.block for p in found.pairs] == [1, 2, 3]
    vk_first = [block.order[0].startswith("vk") for block in CLEAN.run.plan.blocks]
    slots = [p.slots for p in compare(mine, theirs).pairs]
    assert slots == [-1.0 if first else 1.0 for first in vk_first]
    assert sum(slots) == 0


def test_of_two_baselines_the_smaller_ratio_is_quoted() -> None:
    row = ANALYSIS.row(cell_of(CLEAN, "vk", "mtp3").id)
    only = row.comparisons[0]
    assert only.ratio is not None
    faster = only.model_copy(update={"against": "stock-compiled", "ratio": only.ratio / 2})
    unknown = only.model_copy(update={"against": "broken", "ratio": None})
    both = row.model_copy(update={"comparisons": (only, faster, unknown)})
    assert both.comparison is not None
    assert both.comparison.against == "stock-compiled"
    alone = row.model_copy(update={"comparisons": (unknown,)})
    assert alone.comparison is unknown
    assert row.model_copy(update={"comparisons": ()}).comparison is None


def test_holm_withdraws_what_many_cells_make_likely() -> None:
    from finalbench.aggregate.compare import with_holm

    row = ANALYSIS.row(cell_of(CLEAN, "vk", "mtp3").id).comparisons[0]
    family = {
        name: row.model_copy(update={"p_value": p, "holm_p": None})
        for name, p in (("a", 0.001), ("b", 0.03), ("c", 0.04), ("d", None))
    }
    found = with_holm(family)
    assert found["a"].verdict is Verdict.FASTER
    assert found["a"].holm_p == pytest.approx(0.003)
    assert found["b"].verdict is Verdict.INCONCLUSIVE
    assert found["b"].reason == "not significant among 3 cells (Holm p = 0.06)"
    assert found["d"].holm_p is None


def test_the_declared_cell_is_not_corrected_for_the_others() -> None:
    for row in ANALYSIS.rows:
        comparison = row.comparison
        if comparison is None or comparison.p_value is None:
            continue
        alone = row.cell.axis == "base"
        assert comparison.holm_p is not None
        assert (comparison.holm_p == comparison.p_value) or not alone
    others = [r for r in ANALYSIS.rows if r.comparison is not None and r.cell.axis != "base"]
    smallest = min(others, key=lambda r: (r.comparison and r.comparison.p_value) or 1.0)
    assert smallest.comparison is not None
    assert smallest.comparison.holm_p == pytest.approx(
        len(others) * (smallest.comparison.p_value or 0.0)
    )


def test_classes_are_on_every_row() -> None:
    for row in ANALYSIS.rows:
        assert row.marks.weights == "real"
        assert row.marks.status == "self-reported"
        expected = "not_applicable" if row.cell.arm == "stock" else None
        if expected is None:
            expected = "not_applicable" if row.cell.sampling == "t07" else "identical"
        assert row.marks.equality == expected


def test_s08_random_or_synthetic_is_never_lossless_nor_ranked_with_real() -> None:
    random = analyse(as_random(CLEAN))
    assert random.model == "toy shape"
    assert random.headline.weights == "random"
    assert not any(r.marks.lossless for r in random.rows)
    assert any(r.marks.lossless for r in ANALYSIS.rows)
    boards = leaderboard([ANALYSIS, random])
    assert len(boards) == 2
    for board in boards:
        assert len({r.row.marks.weights for r in board.rows}) == 1
    synthetic = Marks(weights="real", acceptance="synthetic", equality="identical")
    assert not synthetic.lossless
    assert Marks(weights="real", acceptance="measured", equality="ties(3)").lossless
    assert not Marks(weights="real", acceptance="measured", equality="divergent").lossless


def test_synthetic_cells_are_marked_by_their_draft() -> None:
    drafts = {"none": {}, "mtp3": {"method": "mtp", "k": 3, "acceptance": 0.8}}
    found = analyse(make_records(a_run(scenario(drafts=drafts))))
    for row in found.rows:
        synthetic = row.cell.draft["acceptance"] is not None
        assert row.marks.acceptance == ("synthetic" if synthetic else "measured")
    assert found.headline.acceptance == "synthetic"
    boards = leaderboard([found])
    assert {b.key["acceptance"] for b in boards} == {"synthetic", "measured"}


def test_the_board_ranks_the_base_setting() -> None:
    board = leaderboard([ANALYSIS])[0]
    assert [r.position for r in board.rows] == [1, 2, 3]
    assert [(r.row.cell.arm, r.row.cell.draft_label) for r in board.rows] == [
        ("vk", "mtp3"),
        ("vk", "none"),
        ("stock", "none"),
    ]
    assert not any(r.tied for r in board.rows)
    assert board.resolution is not None and 0 < board.resolution < 0.05
    assert board.note is None


def test_rows_that_cannot_be_told_apart_share_a_position() -> None:
    level = analyse(make_records(step_ms={"vk": 20.0 * 31 / 13, "stock": 20.0}, noise=0.02))
    board = leaderboard([level])[0]
    top = [r for r in board.rows if r.position == 1]
    assert {(r.row.cell.arm, r.row.cell.draft_label) for r in top} == {
        ("vk", "mtp3"),
        ("stock", "none"),
    }
    assert all(r.tied for r in top)
    assert board.rows[2].position == 3
    assert board.note == "rows that share a position cannot be told apart"


def test_divergent_rows_are_not_ranked() -> None:
    base = cell_of(CLEAN, "vk", "mtp3")
    found = analyse(edit(CLEAN, lambda r: r.cell_id == base.id, token_ids=tuple(range(32))))
    row = next(r for r in leaderboard([found])[0].rows if r.row.cell.id == base.id)
    assert (row.position, row.reason) == (None, "outputs diverge")
    assert found.headline.equality == "divergent"


def test_verified_rows_come_first_and_states_never_mix() -> None:
    slower = analyse(make_records(step_ms={"vk": 10.0, "stock": 20.0}))
    verified = slower.model_copy(
        update={
            "run_id": "verified-run",
            "rows": tuple(
                r.model_copy(update={"marks": r.marks.model_copy(update={"status": "verified"})})
                for r in slower.rows
            ),
        }
    )
    boards = leaderboard([ANALYSIS, verified])
    assert [b.status for b in boards] == ["verified", "self-reported"]
    assert {r.run_id for r in boards[0].rows} == {"verified-run"}


def test_runs_share_a_board_only_on_equal_ground() -> None:
    again = ANALYSIS.model_copy(update={"run_id": "another"})
    assert len(leaderboard([ANALYSIS, again])) == 1
    level = leaderboard([ANALYSIS, again])[0]
    assert [r.position for r in level.rows] == [1, 1, 3, 3, 5, 5]
    for name, value in (("hardware", "other"), ("model", "other"), ("dtype", "bfloat16")):
        assert len(leaderboard([ANALYSIS, again.model_copy(update={name: value})])) == 2


def test_spread_says_which_axis_moves_the_number() -> None:
    rows = {(s.arm, s.axis): s for s in ANALYSIS.spread}
    draft = rows["vk", "draft"]
    assert (draft.low_label, draft.high_label) == ("none", "mtp3")
    assert draft.factor == pytest.approx(31 / 13, rel=1e-6)
    assert [label for label, _ in rows["vk", "seq_len"].points] == ["128", "512"]
    assert ("stock", "draft") not in rows
    assert set(rows) == {
        ("vk", "seq_len"),
        ("vk", "sampling"),
        ("vk", "draft"),
        ("stock", "seq_len"),
        ("stock", "sampling"),
    }


def test_spread_leaves_invalid_cells_out() -> None:
    plain = cell_of(CLEAN, "vk", "none")
    found = analyse(edit(CLEAN, lambda r: r.cell_id == plain.id, done_seen=False))
    assert ("vk", "draft") not in {(s.arm, s.axis) for s in found.spread}


def test_variance_is_attributed_to_processes_and_prompts() -> None:
    noisy = analyse(make_records(a_run(scenario(measure={"blocks": 10})), noise=0.05, seed=4))
    table = next(v for v in noisy.variance if v.arm == "stock")
    shares = {c.source: c.share for c in table.components}
    assert shares["process"] > 0.8
    assert shares["within"] < 0.05
    assert table.cv == pytest.approx(0.05, rel=0.6)
    assert table.observations == 10 * 4 * 3


def test_domains_split_the_headline_cell() -> None:
    assert [d.domain for d in ANALYSIS.domains] == ["chat", "code"]
    for split in ANALYSIS.domains:
        assert split.requests == 8
        assert split.ratio == pytest.approx(4 * 31 / 13, rel=0.02)
        assert split.acceptance_length == pytest.approx(1 + 18 / 13)
        assert split.reason is None


def a_bare_loop(**fields: Any) -> BareLoop:
    known = {
        "decode_tok_s": 50.0,
        "tokens": 32,
        "seconds": 0.6,
        "prompt_tokens": 512,
        "output_tokens": 32,
        "reason": None,
        "raw": None,
    }
    return BareLoop(**{**known, **fields})


def test_the_baseline_over_http_against_its_bare_loop() -> None:
    found = analyse(make_records(a_run(bare_loop=a_bare_loop()))).bare_loop
    assert found.http_decode_tok_s is not None
    assert found.share == pytest.approx(found.http_decode_tok_s / 50.0)
    assert found.reason is None
    assert ANALYSIS.bare_loop.reason == "the bare loop was not timed"
    records = make_records(a_run(bare_loop=a_bare_loop(after_block=1)), noise=0.05, seed=4)
    behind = analyse(records)
    blocks = next(r.cell for r in behind.rows if r.cell.arm == "stock").decode_tok_s_blocks
    assert behind.bare_loop.http_decode_tok_s == blocks[1] != blocks[0]
    failed = a_bare_loop(decode_tok_s=None, reason="exit 3")
    assert analyse(make_records(a_run(bare_loop=failed))).bare_loop.reason == "exit 3"


def test_the_bare_loop_in_turns_gives_a_ratio_and_an_interval_for_each_block() -> None:
    def turn(share: float, **fields: Any) -> BareTurn:
        known = {"prompt_index": 0, "first": "bare", "same_tokens": True}
        spans = {"bare_tokens": 63, "bare_seconds": 1.0, "http_tokens": 63}
        return BareTurn(**{**known, **spans, "http_seconds": 1.0 / share, **fields})

    def block(index: int, *shares: float, **fields: Any) -> BareBlock:
        turns = tuple(turn(share) for share in shares)
        return BareBlock(**{"block": index, "server_id": "s", "turns": turns, **fields})

    blocks = (block(0, 0.96, 0.98), block(1, 0.98, 0.98), block(2, reason="exit code 1"))
    found = analyse(make_records(a_run(bare_loop=a_bare_loop(blocks=blocks)))).bare_loop
    first, second, third = found.blocks
    assert first.share == pytest.approx(math.sqrt(0.96 * 0.98))
    assert first.low is not None and first.high is not None
    assert first.low < 0.96 and first.high > 0.98
    assert (second.share, second.low, second.high) == pytest.approx((0.98, 0.98, 0.98))
    assert (third.share, third.turns, third.reason) == (None, 0, "exit code 1")
    # Over blocks, not over turns: two blocks, so one degree of freedom.
    assert found.share == pytest.approx(math.sqrt(first.share * 0.98))
    half = 12.706 * abs(math.log(first.share / 0.98)) / 2
    assert found.low == pytest.approx(found.share * math.exp(-half), rel=1e-3)
    assert found.high == pytest.approx(found.share * math.exp(half), rel=1e-3)
    assert found.bare_decode_tok_s == pytest.approx(63.0)
    assert found.same_tokens is True
    alone = a_bare_loop(blocks=(block(0, 0.96, 0.98),))
    one = analyse(make_records(a_run(bare_loop=alone))).bare_loop
    assert (one.low, one.high) == pytest.approx((first.low, first.high))
    other = BareBlock(block=0, server_id="s", turns=(turn(0.97, same_tokens=False),))
    differ = analyse(make_records(a_run(bare_loop=a_bare_loop(blocks=(other,))))).bare_loop
    assert differ.same_tokens is False and differ.low is None
    nothing = a_bare_loop(decode_tok_s=None, blocks=(block(0, reason="it died"),), reason="it died")
    empty = analyse(make_records(a_run(bare_loop=nothing))).bare_loop
    assert (empty.share, empty.reason) == (None, "it died")


def test_summary_is_the_documented_json() -> None:
    document = summary(ANALYSIS)
    assert json.loads(json.dumps(document)) == document
    assert list(document)[:4] == ["schema_version", "run", "status", "headline"]
    assert list(document["headline"])[:13] == [
        "model",
        "arm",
        "against",
        "decode_tok_s",
        "against_decode_tok_s",
        "ratio",
        "ratio_interval",
        "verdict",
        "equality",
        "acceptance_length",
        "bandwidth_share",
        "weights",
        "acceptance",
    ]
    assert document["headline"]["verdict"] == "FASTER"
    assert len(document["cells"]) == len(CLEAN.run.plan.cells)
    cell = document["cells"][0]
    assert cell["valid"] is True
    assert cell["against"] == "stock"


def test_l10_every_view_takes_one_stored_value() -> None:
    document = summary(ANALYSIS)
    by_id = {c["id"]: c for c in document["cells"]}
    for row in ANALYSIS.rows:
        assert by_id[row.cell.id]["decode_tok_s"] == row.cell.decode_tok_s == row.value
    base = by_id[ANALYSIS.headline.cell_id or ""]
    assert document["headline"]["decode_tok_s"] == base["decode_tok_s"]
    assert document["headline"]["ratio"] == base["ratio"]


def test_analyse_reads_a_folder_and_trusts_only_its_records(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", CLEAN)
    seal(run)
    found = analyse(run)
    assert isinstance(found, Analysis)
    assert found.headline == ANALYSIS.headline
    assert summary(run) == summary(found)
    metrics = run / "metrics.json"
    metrics.write_text(metrics.read_text().replace('"arm": "vk"', '"arm": "VK"', 1))
    with pytest.raises(BundleBroken, match=r"cells\[\d+\]\.arm is 'VK', the records give 'vk'"):
        analyse(run)


def test_g05_g14_second_copies_show_the_noise_floor_and_nothing_else() -> None:
    spec = scenario(arms=("vk", "stock", "vk-aa", "stock-aa"))
    found = analyse(
        make_records(
            a_run(spec), step_ms={"vk": 5.0, "vk-aa": 5.0, "stock": 20.0, "stock-aa": 20.0}
        )
    )
    assert found.headline.arm == "vk"
    assert found.headline.against == "stock"
    assert {(a.arm, a.twin) for a in found.aa} == {("vk", "vk-aa"), ("stock", "stock-aa")}
    for row in found.aa:
        assert row.comparison.ratio == pytest.approx(1.0, abs=0.02)
        assert row.comparison.verdict is not Verdict.FASTER
        assert row.comparison.against == row.arm
    assert found.aa_reason is None
    ids = {r.row.cell.arm for board in leaderboard([found]) for r in board.rows}
    assert ids == {"vk", "stock"}
    assert ANALYSIS.aa == ()
    assert ANALYSIS.aa_reason == "not measured: the scenario has no second copy of an arm"
    assert len(summary(found)["aa"]) == len(found.aa) == 9


def test_g04_an_offset_of_one_copy_is_seen() -> None:
    spec = scenario(arms=("vk", "stock", "vk-aa"))
    steps = {"vk": 5.0, "vk-aa": 5.0 * 1.46, "stock": 20.0}
    found = analyse(make_records(a_run(spec), step_ms=steps))
    assert {a.comparison.verdict for a in found.aa} == {Verdict.SLOWER}


def test_a_run_without_baseline_states_why_there_is_no_ratio() -> None:
    alone = scenario(arms=("vk",), baseline=None)
    found = analyse(make_records(a_run(alone)))
    assert found.headline.decode_tok_s is not None
    assert found.headline.ratio is None
    assert found.headline.reasons["ratio"] == "no baseline in this run"
    assert found.headline.equality == "identical" or found.headline.equality == "not_judged"
