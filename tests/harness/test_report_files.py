"""From run folders to files: words kept in every format, same bytes, in little time.

Snapshots are renewed with FINALBENCH_UPDATE_SNAPSHOTS=1; read the difference before committing.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import report_pages as pages
import report_runs as runs
import yaml
from huggingface_hub import DatasetCard

from finalbench import report
from finalbench.bundle import seal
from finalbench.errors import BundleBroken
from finalbench.record import Failure
from finalbench.report import export, gallery, markdown
from finalbench.report.build import build_page
from finalbench.report.tables import all_tables, cells_table
from finalbench.report.view import Page

SNAPSHOTS = Path(__file__).parents[1] / "snapshots"


def card(page: Page) -> str:
    return markdown.card(page, all_tables(page))


def leaderboard(page: Page) -> str:
    return markdown.leaderboard(page, all_tables(page))


def cells_csv(page: Page) -> str:
    return export.table_csv(cells_table(page.cells))


def compare(name: str, text: str) -> None:
    path = SNAPSHOTS / name
    if os.environ.get("FINALBENCH_UPDATE_SNAPSHOTS"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, f"{name} changed; see this file's docstring"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = runs.make_run(tmp_path_factory.mktemp("runs"))
    seal(path, now_utc="2026-11-30T22:05:00+00:00")
    return path


@pytest.mark.parametrize("name", ["leaderboard.md", "card.md", "cells.csv"])
def test_snapshot(name: str) -> None:
    text = {
        "leaderboard.md": leaderboard(pages.page()),
        "card.md": card(pages.page()),
        "cells.csv": cells_csv(pages.page()),
    }[name]
    compare(name, text)


def test_snapshot_of_random_weights() -> None:
    compare("card-random.md", card(pages.random_page()))


def test_a_run_folder_gives_every_file(run_dir: Path, tmp_path: Path) -> None:
    written = report.render([run_dir], tmp_path)
    names = {path.name for path in written}
    assert names == {
        "leaderboard.md",
        "report.html",
        "card.md",
        "cells.csv",
        "report.json",
        "benchmark-action.json",
    }
    trend = json.loads((tmp_path / "benchmark-action.json").read_text())
    assert len(trend) == 15
    assert all(entry["value"] > 0 and "unverified" in entry["extra"] for entry in trend)
    text = (tmp_path / "card.md").read_text()
    assert "as fast as stock" in text
    assert "finalbench run --model vk-tiny" in text
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["schema_version"] == 1
    assert len(data["tables"]["cells"]) == 15


def test_another_process_writes_the_same_bytes(run_dir: Path, tmp_path: Path) -> None:
    report.render([run_dir], tmp_path / "here")
    code = (
        "import sys; from pathlib import Path; from finalbench import report; "
        "report.render([Path(sys.argv[1])], Path(sys.argv[2]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77", "TZ": "Asia/Seoul", "LC_ALL": "C"}
    subprocess.run(
        [sys.executable, "-c", code, str(run_dir), str(tmp_path / "there")],
        check=True,
        env=environment,
    )
    for path in (tmp_path / "here").iterdir():
        assert path.read_bytes() == (tmp_path / "there" / path.name).read_bytes(), path.name


def test_every_plot_comes_from_the_records(tmp_path: Path) -> None:
    """Prompt length, drafts under the roofline, streams, positions, spread, clocks and power."""
    described = runs.scenario(
        "axes.concurrency=[1,4]",
        "base={seq_len: 2048, output_len: 64, sampling: greedy, draft: mtp3, concurrency: 1}",
        "axes.seq_len=[512,2048]",
        "axes.sampling=[greedy]",
        "axes.draft=[none,mtp3]",
        "workload.requests=8",
        "measure.blocks=2",
    )
    sensors = {"gpu_sm_clock_mhz": 1980.0, "gpu_power_w": 420.0}
    path = runs.make_run(tmp_path, described, bandwidth=25e9, sensors=sensors)
    found = {f.id: f for group in gallery.groups(build_page([path])) for f in group.figures}
    wanted = {"seq_len", "draft", "position", "roofline", "spread", "throughput", "latency"}
    assert {f"m1-{name}" for name in wanted} <= set(found)
    lengths = found["m1-seq_len"].series
    assert [[p.x for p in s.points] for s in lengths if s.tone] == [[512, 2048]] * 2
    assert [p.x for p in found["m1-latency"].series[0].points] == [1, 4]
    assert [p.x for p in found["m1-position"].series[0].points] == [1, 2, 3]
    assert len(found["m1-spread"].categories) >= 4
    roof = found["m1-roofline"]
    limit = next(s for s in roof.series if s.reference)
    points = [p for s in roof.series if not s.reference for p in s.points]
    assert {"k=3"} <= {p.label for p in points}
    for point in points:
        above = next(p.y for p in limit.points if p.x == point.x)
        assert point.y < above
    sensors_drawn = {f.title: f.series[0].points for name, f in found.items() if name[0] == "t"}
    assert sensors_drawn["GPU SM clock over the run"][3].y == 1980
    assert sensors_drawn["GPU power over the run"][3].y == 420


def test_an_edited_metrics_file_is_refused(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / run_dir.name
    copy.mkdir()
    for path in run_dir.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    text = (copy / "metrics.json").read_text()
    (copy / "metrics.json").write_text(
        re.sub(r'"decode_tok_s": [\d.]+', '"decode_tok_s": 601', text)
    )
    with pytest.raises(BundleBroken, match="601"):
        report.render([copy], tmp_path / "out")


def test_failed_cells_reach_every_format(tmp_path: Path) -> None:
    plan_cell = build_page([runs.make_run(tmp_path / "a")]).cells[0]
    failure = Failure(cell_id=plan_cell.id, block=1, roll=0, reason="server died: exit code -9")
    path = runs.make_run(tmp_path / "b", failures=(failure,))
    report.render([path], tmp_path / "out")
    for name in ("leaderboard.md", "report.html", "card.md", "report.json"):
        text = (tmp_path / "out" / name).read_text()
        assert "server died: exit code -9" in text, name
        assert "partial" in text or name == "leaderboard.md", name


def test_several_runs_share_one_page(tmp_path: Path) -> None:
    small = runs.scenario("workload.requests=2")
    made = [
        runs.make_run(tmp_path, small, run_id=f"20261130T22000{i}Z-vk-tiny-1a2b3c4d", speed=s)
        for i, s in enumerate((1.0, 1.4))
    ]
    page = build_page(made)
    assert len(page.headlines) == 2
    assert [len(board.rows) for board in page.boards] == [12]
    ranked = [row for row in page.boards[0].rows if row.position is not None]
    assert ranked[0].run_id == made[1].name
    assert build_page(list(reversed(made))) == page
    written = {str(path.relative_to(tmp_path)) for path in report.render(made, tmp_path / "out")}
    assert {f"out/cards/{path.name}.md" for path in made} <= written


@pytest.mark.slow
def test_200_cells_of_5_runs_in_5_seconds(tmp_path: Path) -> None:
    axes = "axes.seq_len=[64,96,128,192,256,384,512,768,1024,2048]"
    wide = runs.scenario(axes, "grid=full", "workload.requests=1", "measure.blocks=2")
    page = build_page([runs.make_run(tmp_path, wide)])
    cells = (page.cells * 3)[:200]
    many = page.model_copy(
        update={
            "cells": tuple(
                cell.model_copy(update={"run_id": f"run-{i}"}) for i in range(5) for cell in cells
            ),
            "headlines": page.headlines * 5,
            "boards": page.boards * 5,
        }
    )
    report.render_page(page, tmp_path / "warm")  # the font cache is the installation's cost
    start = time.process_time()
    report.render_page(many, tmp_path / "out")
    assert time.process_time() - start < 5


def test_every_row_of_the_csv_carries_its_classes() -> None:
    for line in csv.DictReader(io.StringIO(cells_csv(pages.random_page()))):
        for word in ("random weights", "synthetic acceptance", "unverified"):
            assert word in line["decode_tok_s_shown"]
            assert word in line["classes"]
        assert float(line["decode_tok_s"]) > 0


def test_a_spreadsheet_runs_no_formula_from_a_name() -> None:
    bad = pages.cells()[0].model_copy(update={"sampling": "=cmd|'/c calc'!A0"})
    page = pages.page().model_copy(update={"cells": (bad,)})
    line = next(csv.DictReader(io.StringIO(cells_csv(page))))
    assert line["sampling"].startswith("'=")


def test_every_markdown_number_of_a_random_row_carries_the_words() -> None:
    for text in (card(pages.random_page()), leaderboard(pages.random_page())):
        rows = [line for line in text.splitlines() if line.startswith("| ") and "601.0" in line]
        assert rows
        for row in rows:
            cell = next(part for part in row.split(" | ") if "601.0" in part)
            for word in ("random weights", "synthetic acceptance", "unverified"):
                assert word in cell


def test_the_card_says_only_limits_that_hold() -> None:
    real, made_up = card(pages.page()), card(pages.random_page())
    assert "random weights" not in real
    assert "synthetic" not in real
    assert "the model's shape and not its weights" in made_up
    assert "accepted at a set chance" in made_up


def test_the_card_says_who_ran_it_and_whether_a_a_was_measured(run_dir: Path) -> None:
    text = card(build_page([run_dir]))
    assert "root hash" in text[text.index("## Provenance") :]
    assert "| Workload | A/A | not measured" in text


def test_the_card_is_a_valid_hub_card() -> None:
    header = yaml.safe_load(card(pages.page()).split("---")[1])
    assert header["license"] and header["pretty_name"] and "benchmark" in header["tags"]
    made = DatasetCard(card(pages.hostile_page()))
    assert "alert" in made.data.pretty_name


def test_markdown_of_hostile_text_holds_no_markup() -> None:
    text = card(pages.hostile_page())
    body = text.split("---", 2)[2]
    outside = re.sub(r"(`{3,})bash\n.*?\n\1", "", body, flags=re.DOTALL)
    assert not re.search(r"<(?:script|img)", outside)
    assert not re.search(r"(?<!\\)\]\(", outside)
    tables = [line for line in outside.splitlines() if line.startswith("| ")]
    assert tables and all(line.endswith(" |") for line in tables)


def test_a_code_block_cannot_be_closed_from_inside() -> None:
    block = markdown.fence("a\n```\nrm -rf /\n", "bash")
    assert block.startswith("````bash") and block.endswith("\n````")


def test_space_folder(run_dir: Path, tmp_path: Path) -> None:
    report.render([run_dir], tmp_path, space=True)
    header = yaml.safe_load((tmp_path / "README.md").read_text().split("---")[1])
    assert header["sdk"] == "static"
    assert (tmp_path / header["app_file"]).read_bytes() == (tmp_path / "report.html").read_bytes()


def test_an_aa_run_shows_it_beside_the_ab_and_ranks_no_copy(tmp_path: Path) -> None:
    described = runs.scenario(
        "workload.requests=2", "axes.seq_len=[512]", "arms=[vk, vk-aa, stock, stock-aa]"
    )
    page = build_page([runs.make_run(tmp_path, described)])
    assert {row.arm for row in page.aa} == {"VKAE", "stock"}
    assert all(row.ratio.value and 0.9 < row.ratio.value < 1.1 for row in page.aa)
    ranked = [row.arm_label for board in page.boards for row in board.rows]
    assert ranked and not [name for name in ranked if "copy" in name]
    text = card(page)
    assert "A/A: the same server" in leaderboard(page)
    assert "told apart |" in text


def test_draft_costs_explain_the_gain(tmp_path: Path) -> None:
    page = build_page([runs.make_run(tmp_path)])
    assert [row.setting for row in page.costs] == ["mtp k=3", "mtp k=1", "mtp k=2", "ngram k=3"]
    for row in page.costs:
        assert row.expected_gain == pytest.approx(row.acceptance_length / row.cost)
