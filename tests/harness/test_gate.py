"""The gate on whole run folders: verdicts, refusals by name, pins, drift, and its formats."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from run_records import a_run, cell_of, edit, make_records, provenance, scenario, write_run

from finalbench.bundle import seal
from finalbench.errors import BundleBroken, UsageError
from finalbench.gate import (
    gate,
    read_pin,
    refresh_pin,
    resolve,
    to_json,
    to_junit,
    to_markdown,
    write_step_summary,
)
from finalbench.record import Classes, RunRecords
from finalbench.stats import Verdict

Make = Callable[..., Path]
AXES = {"seq_len": (128,), "output_len": (32,), "sampling": ("greedy",), "draft": ("none", "mtp3")}
BASE = {"seq_len": 128, "output_len": 32, "sampling": "greedy", "draft": "mtp3"}
SMALL: dict[str, Any] = {"axes": AXES, "base": BASE, "workload": {"requests": 3}}


def small_run(run_id: str = "run", blocks: int = 6, **updates: Any) -> Any:
    return a_run(
        scenario(**{**SMALL, "measure": {"blocks": blocks}}), **{"run_id": run_id, **updates}
    )


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Write and seal a run whose engine is `slower` times as slow as the plain one.

    The same run is written once, as tests only read it.
    """
    known: dict[str, Path] = {}

    def build(name: str, **asked: Any) -> Path:
        key = repr((name, sorted(asked.items())))
        if key not in known or "change" in asked:
            known[key] = write(name, tmp_path_factory.mktemp("run"), **asked)
        return known[key]

    def write(
        name: str,
        folder: Path,
        *,
        slower: float = 1.0,
        host: float = 1.0,
        noise: float = 0.004,
        seed: int | None = None,
        blocks: int = 6,
        change: Callable[[RunRecords], RunRecords] = lambda r: r,
        **updates: Any,
    ) -> Path:
        records = make_records(
            small_run(name, blocks, **updates),
            noise=noise,
            seed=len(name) if seed is None else seed,
            step_ms={"vk": 5.0 * slower * host, "stock": 20.0 * host},
        )
        path = write_run(folder / name, change(records))
        seal(path, now_utc="2026-11-30T22:10:00+00:00")
        return path

    return build


def test_the_same_engine_passes_as_equivalent(make: Make) -> None:
    result = gate(make("old"), make("newer"))
    assert (result.outcome, result.exit_code) == ("pass", 0)
    assert [c.verdict for c in result.cells] == [Verdict.EQUIVALENT]
    assert result.cells[0].method == "ratio"
    assert result.cells[0].blocks == (6, 6)
    assert result.detectable is not None and 0 < result.detectable < 0.03
    assert [c.arm for c in result.exploratory] == ["vk"]
    assert not result.confounded


@pytest.mark.parametrize(("slower", "outcome", "code"), [(1.1, "regression", 1), (0.9, "pass", 0)])
def test_g09_ten_percent_either_way(make: Make, slower: float, outcome: str, code: int) -> None:
    result = gate(make("old"), make("newer", slower=slower))
    assert (result.outcome, result.exit_code) == (outcome, code)
    assert result.cells[0].ratio == pytest.approx(1 / slower, rel=0.01)
    assert result.cells[0].verdict is (Verdict.SLOWER if code else Verdict.FASTER)


def test_a_slower_host_is_not_a_regression(make: Make) -> None:
    """Both arms slow down together: the ratio stands, the direct change is shown."""
    result = gate(make("old"), make("newer", host=1.3))
    assert result.outcome == "pass"
    assert result.cells[0].ratio == pytest.approx(1.0, abs=0.01)
    assert result.cells[0].direct_ratio == pytest.approx(1 / 1.3, rel=0.01)


def test_noise_is_inconclusive_and_never_green(make: Make) -> None:
    result = gate(make("old", noise=0.1), make("newer", noise=0.1))
    assert (result.outcome, result.exit_code) == ("inconclusive", 6)
    assert "detectable" in result.reasons[0]


def test_one_block_cannot_pass(make: Make) -> None:
    result = gate(make("old", blocks=1), make("newer", blocks=1))
    assert result.outcome == "inconclusive"
    assert result.cells[0].reason == "one block: no interval"


def test_g07_a_gate_that_cannot_see_its_target_is_a_configuration_error(make: Make) -> None:
    noisy = make("old", noise=0.1), make("newer", noise=0.1)
    with pytest.raises(UsageError, match=r"the gate is to see 5\.0%"):
        gate(*noisy, target=0.05)
    single = make("old1", blocks=1), make("new1", blocks=1)
    with pytest.raises(UsageError, match="can show nothing"):
        gate(*single, target=0.05)
    assert gate(make("quiet"), make("quieter"), target=0.05).outcome == "pass"


def test_diverging_outputs_fail_whatever_the_speed(make: Make) -> None:
    def flip(records: RunRecords) -> RunRecords:
        cell = cell_of(records, "vk", "mtp3", seq_len=128)
        return edit(records, lambda r: r.cell_id == cell.id, token_ids=tuple(range(32)))

    result = gate(make("old"), make("newer", slower=0.5, change=flip))
    assert (result.outcome, result.exit_code) == ("divergent", 1)
    assert "differ from those without drafts" in result.reasons[0]


@pytest.mark.parametrize("fault", [-1, 0])
def test_f08_impossible_or_missing_values_are_no_measurement(make: Make, fault: int) -> None:
    def broken(records: RunRecords) -> RunRecords:
        cell = cell_of(records, "vk", "mtp3", seq_len=128)
        if fault == 0:
            return edit(records, lambda r: r.cell_id == cell.id, status="failed", error="x")
        first = next(r for r in records.requests if r.cell_id == cell.id)
        backwards = tuple((first.chunks[0][0] - i, n) for i, (_, n) in enumerate(first.chunks))
        return edit(records, lambda r: r is first, chunks=backwards)

    result = gate(make("old"), make("newer", change=broken))
    assert (result.outcome, result.exit_code) == ("incomparable", 5)
    assert "invalid in the candidate" in result.reasons[0]


def servers(**settings: Any) -> Callable[[RunRecords], RunRecords]:
    def change(records: RunRecords) -> RunRecords:
        return replace(
            records,
            servers=tuple(
                s.model_copy(
                    update={
                        name: {**(getattr(s, name) or {}), **settings}
                        for name in ("settings", "settings_after")
                    }
                )
                for s in records.servers
            ),
        )

    return change


@pytest.mark.parametrize(
    ("updates", "words"),
    [
        (
            {"provenance": provenance(cpu="Other CPU")},
            "hardware differs: Test CPU, 2 cores against",
        ),
        ({"provenance": provenance(cores=64)}, "hardware differs"),
        ({"change": servers(threads=16)}, "settings of stock: threads differs: 2 against 16"),
        ({"change": servers(dtype="bfloat16")}, "settings of vk: dtype differs"),
        ({"change": servers(model_digest="0" * 64)}, "weights (model digest) differs"),
        (
            {"classes": Classes(weights="random", acceptance="measured")},
            "weights differs: real against random",
        ),
        ({"status": "cancelled"}, "the candidate run is cancelled"),
        ({"blocks": 5}, "scenario differs"),
    ],
)
def test_unequal_ground_is_refused_by_name(make: Make, updates: dict[str, Any], words: str) -> None:
    result = gate(make("old"), make("newer", **updates))
    assert (result.outcome, result.exit_code) == ("incomparable", 5)
    assert any(words in reason for reason in result.reasons), result.reasons


@pytest.mark.parametrize(
    "setting",
    [
        {"nonce": "x"},
        {"pid": 77},
        {"host_launch_us": 9},
        {"versions": {"torch": "3"}},
        {"model": "/m"},
        {"routing": {"distinct_experts": [8.1]}},
    ],
)
def test_what_differs_from_run_to_run_is_no_refusal(make: Make, setting: dict[str, Any]) -> None:
    def change(records: RunRecords) -> RunRecords:
        changed = servers(**setting)(records)
        if "nonce" not in setting:
            return changed
        return replace(
            changed, servers=tuple(s.model_copy(update={"nonce": "x"}) for s in changed.servers)
        )

    assert gate(make("old"), make("newer", change=change)).outcome == "pass"


def test_p04_g13_changes_are_listed_and_two_kinds_confound(make: Make) -> None:
    code = provenance().model_copy(update={"git_commit": "1" * 40})
    one = gate(make("old"), make("newer", provenance=code))
    assert [(c.factor, c.name) for c in one.changes] == [("code", "commit")]
    assert not one.confounded
    both = code.model_copy(update={"packages": {"vkengine": "0.2.0", "torch": "2.13"}})
    two = gate(make("older"), make("newest", provenance=both))
    assert [(c.factor, c.name) for c in two.changes] == [
        ("code", "commit"),
        ("packages", "torch"),
        ("code", "vkengine"),
    ]
    assert two.confounded
    assert "confounded" in to_markdown(two)
    moved = provenance().model_copy(update={"os": "Linux 9", "host": "other"})
    three = gate(make("o"), make("nn", provenance=moved))
    assert [c.factor for c in three.changes] == ["system", "host"]
    assert not three.confounded


def test_all_cells_can_be_gated_with_holm(make: Make) -> None:
    result = gate(make("old"), make("newer"), family="all")
    assert len(result.cells) == 2
    assert result.exploratory == ()
    assert all(c.holm_p is not None and c.holm_p >= (c.p_value or 0) for c in result.cells)


def test_g06_a_trip_needs_its_confirmation(make: Make) -> None:
    old, slow = make("old"), make("slow", slower=1.1)
    again, fine = make("again", slower=1.1), make("fine")
    assert gate(old, slow, confirmations=[again]).outcome == "regression"
    unconfirmed = gate(old, slow, confirmations=[again, fine])
    assert unconfirmed.outcome == "inconclusive"
    assert unconfirmed.cells[0].reason == "not confirmed by fine"


def test_g11_one_percent_a_release_is_seen_from_the_anchor(make: Make) -> None:
    releases = [make(f"release{i}", slower=1.01**i, noise=0.002, seed=i) for i in range(9)]
    for last, new in itertools.pairwise(releases):
        assert gate(last, new).outcome == "pass"
    drifted = gate(releases[7], releases[8], anchor=releases[0])
    assert drifted.outcome == "regression"
    assert drifted.anchor_run == "release0"
    assert drifted.reasons[0].startswith("against the anchor")
    assert gate(releases[0], releases[1], anchor=releases[0]).outcome == "pass"
    foreign = make("foreign", provenance=provenance(cpu="Other CPU"))
    refused = gate(releases[0], releases[1], anchor=foreign)
    assert refused.outcome == "incomparable"
    assert refused.reasons[0].startswith("anchor: hardware differs")


def test_a_pin_holds_one_sealed_run(make: Make, tmp_path: Path) -> None:
    old, new = make("old"), make("newer")
    pin = tmp_path / "baselines" / "unit.json"
    pin.parent.mkdir()
    first = refresh_pin(pin, old)
    assert first.old is None
    assert resolve(pin).resolve() == old.resolve()
    assert gate(pin, new).outcome == "pass"
    second = refresh_pin(pin, new)
    assert second.old is not None and second.old.run_id == "old"
    assert second.ratio == pytest.approx(1.0, abs=0.01)
    assert second.interval is not None
    assert second.text.startswith("baseline: ")
    assert "95 % interval" in second.text
    assert read_pin(pin).run_id == "newer"
    seal(new, now_utc="2026-12-01T00:00:00+00:00")
    with pytest.raises(BundleBroken, match="its root is"):
        gate(pin, old)
    with pytest.raises(UsageError, match="neither a run folder nor"):
        gate(tmp_path / "nothing", old)
    pin.write_text("{}")
    with pytest.raises(BundleBroken, match="not a pinned baseline"):
        gate(pin, old)


@pytest.mark.slow
def test_g10_refreshing_by_the_same_estimator_does_not_ratchet(make: Make, tmp_path: Path) -> None:
    """Twelve cycles of pure noise: each refresh takes the new run, lucky or not."""
    pin, ratios = tmp_path / "pin.json", []
    for cycle in range(12):
        found = refresh_pin(pin, make(f"night{cycle}", noise=0.01, seed=cycle))
        if found.ratio is not None:
            ratios.append(math.log(found.ratio))
    assert read_pin(pin).run_id == "night11"
    assert min(ratios) < 0 < max(ratios)
    assert sum(ratios) == pytest.approx(0.0, abs=0.03)


def test_formats_agree(make: Make, tmp_path: Path) -> None:
    bad = gate(make("old"), make("newer", slower=1.1))
    document = to_json(bad)
    assert json.loads(json.dumps(document)) == document
    assert document["exit_code"] == 1
    suite = ElementTree.fromstring(to_junit(bad))
    assert suite.attrib == {"name": "finalbench gate", "tests": "1", "failures": "1", "errors": "0"}
    failure = suite.find("testcase/failure")
    assert failure is not None and failure.attrib["type"] == "regression"
    text = to_markdown(bad)
    assert text.startswith("## finalbench gate: regression\n")
    assert "| gated | vk |" in text and "| SLOWER |" in text
    page = tmp_path / "summary.md"
    page.write_text("before\n")
    write_step_summary(bad, page)
    assert page.read_text() == "before\n" + text


def test_junit_never_hides_a_nonzero_exit(make: Make) -> None:
    unsure = gate(make("old", noise=0.1), make("newer", noise=0.1))
    refused = gate(make("a"), make("bb", provenance=provenance(cores=64)))
    green = gate(make("c"), make("dd"))
    for result, failures, errors in ((unsure, "0", "1"), (refused, "0", "1"), (green, "0", "0")):
        suite = ElementTree.fromstring(to_junit(result))
        assert (suite.attrib["failures"], suite.attrib["errors"]) == (failures, errors)
