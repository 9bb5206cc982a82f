"""Faults of others' reports: stale figures, figures without a source, unverified ones as facts."""

from __future__ import annotations

from pathlib import Path

import pytest
import report_runs as runs

from finalbench.bundle import read_manifest, seal
from finalbench.report import render

SMALL = ("workload.requests=2", "measure.blocks=3", "axes.seq_len=[512]")
PAGES = ("report.html", "card.md")  # what carries the seal; tables carry the run's name


def sealed(root: Path, **options: object) -> Path:
    path = runs.make_run(root, runs.scenario(*SMALL), **options)  # ty: ignore[invalid-argument-type]
    seal(path)
    return path


def rendered(run: Path, out: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in render([run], out)}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("report")
    return rendered(sealed(root / "runs"), root / "out")


def test_f09_a_report_shows_the_new_run_and_nothing_of_the_old_one(tmp_path: Path) -> None:
    old = sealed(tmp_path / "a", run_id="20261130T220000Z-vk-tiny-1a2b3c4d")
    new = sealed(tmp_path / "b", run_id="20261201T220000Z-vk-tiny-1a2b3c4d", speed=0.8)
    before = rendered(old, tmp_path / "out")
    after = rendered(new, tmp_path / "out")
    assert before.keys() == after.keys()
    roots = [read_manifest(path).root for path in (old, new)]
    for name in PAGES:
        assert roots[0][:12] in before[name]
        assert roots[1][:12] in after[name]
        assert roots[0][:12] not in after[name]
    for name, text in after.items():
        assert text != before[name], name
        assert old.name not in text, name
        assert new.name in text, name


def test_r05_the_card_says_who_measured_and_from_what(texts: dict[str, str]) -> None:
    """Commit, environment, commands and checksums, beside the one who is answerable for them."""
    card = texts["card.md"]
    assert "self-reported" in card
    for fact in (runs.provenance().git_commit, "Linux 6.18", "3.11.7", "Test CPU"):
        assert str(fact) in card, fact
    assert "finalbench run" in card and "finalbench verify" in card


def test_r07_every_export_of_an_unverified_row_says_so(texts: dict[str, str]) -> None:
    assert len(texts) >= 6
    for name, text in texts.items():
        assert "unverified" in text, name
    csv = texts["cells.csv"].splitlines()
    assert len(csv) > 5
    assert all("unverified" in row for row in csv[1:])
