"""The claims ledger: what stands in it, and that its states move only on independent evidence."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
import report_runs as runs
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from finalbench import claims
from finalbench.bundle import seal, sign
from finalbench.claims import Claim, Figure, Ledger, Source
from finalbench.errors import BundleBroken, Inconclusive, UsageError
from finalbench.report.build import build_page
from finalbench.scenario import find_scenario

ROOT = Path(__file__).parents[2]
TODAY = date(2026, 11, 30)
SMALL = ("workload.requests=4", "measure.blocks=4", "axes.seq_len=[512]", "axes.sampling=[greedy]")


def bundle(root: Path, *, host: str, speed: float = 1.0, key: bool = False) -> claims.Bundle:
    name = f"20261130T220000Z-vk-tiny-{host}"
    path = runs.make_run(root, runs.scenario(*SMALL), run_id=name, speed=speed, host=host)
    root_hash = seal(path, now_utc="2026-11-30T22:05:00+00:00").root
    if key:
        pem = root / f"{host}.pem"
        pem.write_bytes(
            Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        sign(path, root_hash, pem)
    return claims.open_bundle(path)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> claims.Bundle:
    return bundle(tmp_path_factory.mktemp("origin"), host="aaaa")


@pytest.fixture
def claim(origin: claims.Bundle) -> Claim:
    return claims.claim_of(origin, claim_id="ours", who="Team A", title="README", on=TODAY)


# A wide margin stands for tight intervals: these hosts' noise is drawn, not measured.
WIDE = 0.35


def test_the_shipped_ledger_holds_the_published_claims_as_self_reported() -> None:
    ledger = claims.load_ledger(ROOT / "results" / "claims.yaml")
    ratios = {claim.model: claim.figure.ratio for claim in ledger.claims if claim.figure.ratio}
    assert ratios == {
        "Qwen3.5-35B-A3B": 23.4,
        "Darwin-36B-Opus": 11.2,
        "JGOS-398B": 4.33,
        "Gemma 4 E4B": 5.3,
        "Qwen3.6-27B": 2.47,
    }
    assert {claim.status for claim in ledger.claims} == {"self-reported"}
    assert all(claim.unknown for claim in ledger.claims)
    for claim in ledger.claims:
        assert claim.scenario is None or find_scenario(claim.scenario).is_file()
    rank = ledger.get("fast-gemma-challenge-rank-1")
    assert "by that event's rules only" in rank.text()


def test_a_ledger_survives_writing_and_reading(claim: Claim, tmp_path: Path) -> None:
    path = tmp_path / "claims.yaml"
    ledger = Ledger(claims=(claim,))
    claims.save_ledger(path, ledger)
    assert claims.load_ledger(path) == ledger


def test_an_edited_status_is_refused(claim: Claim, tmp_path: Path) -> None:
    path = tmp_path / "claims.yaml"
    claims.save_ledger(path, Ledger(claims=(claim,)))
    path.write_text(path.read_text() + "  status: verified\n")
    with pytest.raises(UsageError, match="history"):
        claims.load_ledger(path)


def test_a_ratio_must_follow_from_its_rates() -> None:
    Figure(ratio=23.4, engine_tok_s=601, baseline_tok_s=25.7)
    with pytest.raises(ValueError, match="does not follow"):
        Figure(ratio=23.4, engine_tok_s=455, baseline_tok_s=25.7)


def test_case_g15_a_claim_without_a_scope_is_refused() -> None:
    with pytest.raises(ValueError, match="scope"):
        Claim(
            id="x",
            model="m",
            figure=Figure(ratio=8.0),
            scope=" ",
            hardware=None,
            source=Source(who="w", title="t"),
        )


def test_a_claim_of_ours_names_conditions_and_digests(claim: Claim) -> None:
    assert claim.status == "self-reported"
    assert claim.unknown == ("engine version",)  # the made-up run lists no vkengine package
    assert set(claim.digests) == {"scenario", "engine", "commit", "model"}
    assert "512 in" in claim.scope


def test_a_rerun_on_the_same_host_lifts_nothing(claim: Claim, tmp_path: Path) -> None:
    with pytest.raises(BundleBroken, match="host that made the claim"):
        claims.replicate(claim, bundle(tmp_path, host="aaaa"), by="Team B", on=TODAY, margin=WIDE)


def test_the_claimant_cannot_replicate_from_another_host(claim: Claim, tmp_path: Path) -> None:
    with pytest.raises(BundleBroken, match="made the claim"):
        claims.replicate(claim, bundle(tmp_path, host="bbbb"), by="team a", on=TODAY, margin=WIDE)


def test_one_other_host_replicates_two_with_a_signature_verify(
    claim: Claim, tmp_path: Path
) -> None:
    second = bundle(tmp_path, host="bbbb")
    once = claims.replicate(claim, second, by="Team B", on=TODAY, margin=WIDE)
    assert once.status == "replicated"
    with pytest.raises(BundleBroken, match="already stands"):
        claims.replicate(once, second, by="Team B", on=TODAY, margin=WIDE)
    unsigned = bundle(tmp_path, host="cccc")
    twice = claims.replicate(once, unsigned, by="Team C", on=TODAY, margin=WIDE)
    assert twice.status == "replicated"
    signed = bundle(tmp_path, host="dddd", key=True)
    done = claims.replicate(once, signed, by="Team D", on=TODAY, margin=WIDE)
    assert done.status == "verified"
    assert [move.after for move in done.history] == ["replicated", "verified"]


def test_an_interval_too_wide_moves_nothing(claim: Claim, tmp_path: Path) -> None:
    with pytest.raises(Inconclusive, match="cannot tell"):
        claims.replicate(claim, bundle(tmp_path, host="bbbb"), by="B", on=TODAY, margin=0.001)


def test_a_slower_bundle_contests_and_never_replicates(claim: Claim, tmp_path: Path) -> None:
    slow = bundle(tmp_path, host="bbbb", speed=0.5)
    with pytest.raises(UsageError, match="SLOWER"):
        claims.replicate(claim, slow, by="Team B", on=TODAY)
    contested = claims.contest(claim, slow, by="Team B", on=TODAY)
    assert contested.status == "contested"
    agreeing = bundle(tmp_path, host="cccc")
    with pytest.raises(UsageError, match="agrees"):
        claims.contest(contested, agreeing, by="Team C", on=TODAY, margin=WIDE)
    after = claims.replicate(contested, agreeing, by="Team C", on=TODAY, margin=WIDE)
    assert after.status == "contested"


def test_case_r06_a_changed_digest_makes_it_stale(claim: Claim) -> None:
    same, changed = claims.check(claim, claim.digests, on=TODAY)
    assert (same, changed) == (claim, [])
    stale, changed = claims.check(claim, {**claim.digests, "model": "ff" * 32}, on=TODAY)
    assert stale.status == "stale"
    assert "model" in changed[0]
    again, _ = claims.check(stale, {**claim.digests, "model": "ff" * 32}, on=TODAY)
    assert again == stale


def test_other_hardware_other_scenario_and_ranks_are_not_comparable(
    origin: claims.Bundle, claim: Claim
) -> None:
    ledger = claims.load_ledger(ROOT / "results" / "claims.yaml")
    for name, words in (
        ("vkae-qwen35-35b-a3b", "scenario is vk-tiny"),
        ("fast-gemma-challenge-rank-1", "its own event"),
    ):
        with pytest.raises(BundleBroken, match=words):
            claims.replicate(ledger.get(name), origin, by="Team B", on=TODAY)
    moved = claim.model_copy(update={"hardware": "one B200"})
    with pytest.raises(BundleBroken, match="hardware is Test CPU"):
        claims.replicate(moved, origin, by="Team B", on=TODAY)


def test_random_weights_prove_nothing(claim: Claim, tmp_path: Path) -> None:
    described = runs.scenario(*SMALL, "serving.weights=random:1")
    path = runs.make_run(tmp_path, described, host="bbbb")
    seal(path)
    with pytest.raises(BundleBroken, match="random weights"):
        claims.replicate(claim, claims.open_bundle(path), by="B", on=TODAY, margin=WIDE)


def test_a_damaged_bundle_is_refused(tmp_path: Path) -> None:
    path = runs.make_run(tmp_path, runs.scenario(*SMALL))
    seal(path)
    (path / "telemetry.jsonl").write_text("{}\n")
    with pytest.raises(BundleBroken, match="telemetry"):
        claims.open_bundle(path)


def test_the_page_shows_claimed_beside_measured(tmp_path: Path) -> None:
    ledger = claims.load_ledger(ROOT / "results" / "claims.yaml")
    mine = ledger.claims[0].model_copy(update={"id": "tiny", "scenario": "vk-tiny"})
    page = build_page(
        [runs.make_run(tmp_path, runs.scenario(*SMALL))], ledger=Ledger(claims=(mine,))
    )
    row = page.claims[0]
    assert "23.4x stock" in row.claimed and row.status == "self-reported"
    assert row.measured and "vs stock, on Test CPU" in row.measured
    assert "unverified" in row.measured
    assert "sampling" in row.unknown
    others = build_page([runs.make_run(tmp_path / "b", runs.scenario(*SMALL))], ledger=ledger)
    assert {row.measured for row in others.claims} == {None}
