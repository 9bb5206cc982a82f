"""Every exported form of an unverified, random or synthetic row carries the words, row by row."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import report_runs as runs

from finalbench import hub, report
from finalbench.aggregate import analyse
from finalbench.bundle import seal
from finalbench.cli.finish import Finished
from finalbench.cli.tables import show_run
from finalbench.gate import GateResult, gate, to_json, to_junit, to_markdown

pytestmark = pytest.mark.usefixtures("drawn_once")

SMALL = (
    "workload.requests=2",
    "measure.blocks=2",
    "axes.seq_len=[512]",
    "axes.draft=[none,mtp3]",
    "axes.sampling=[greedy]",
)
KINDS = {
    "unverified": ((), ("unverified",)),
    "synthetic": (
        # Drafts of every depth, so that each row of VK is synthetic.
        (
            "serving.weights=random:1",
            "drafts.mtp1.acceptance=0.8",
            "drafts.mtp3.acceptance=0.8",
            "axes.draft=[mtp1,mtp3]",
            "arms=[vk]",
            "baseline=null",
        ),
        ("random weights", "synthetic acceptance", "unverified"),
    ),
}
NO_NUMBERS = {"failures", "violations", "claims"}  # what went wrong, and others' figures


@dataclass(frozen=True)
class Made:
    """One run and everything that is written of it."""

    run: Path
    words: tuple[str, ...]
    pages: dict[str, str]
    upload: hub.Upload
    again: Path

    def gated(self) -> GateResult:
        return gate(self.run, self.again, family="all")


@pytest.fixture(scope="module", params=list(KINDS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    overrides, words = KINDS[request.param]
    root = tmp_path_factory.mktemp(request.param)
    described = runs.scenario(*SMALL, *overrides)
    paths = []
    for number in range(2):
        path = runs.make_run(root, described, run_id=f"20261130T22000{number}Z-vk-tiny-1a2b3c4d")
        seal(path)
        paths.append(path)
    written = report.render([paths[0]], root / "out", space=True)
    pages = {path.name: path.read_text() for path in written}
    upload = hub.plan_upload(paths[0], "lab/results", environment={})
    return Made(paths[0], words, pages, upload, paths[1])


def html_rows(made: Made) -> list[str]:
    """Rows of tables with numbers, numbers below plots among them, as their visible text."""
    found = []
    for name, body in re.findall(
        r'<table id="([^"]+)".*?<tbody>(.*?)</tbody>', made.pages["report.html"], re.DOTALL
    ):
        if name not in NO_NUMBERS and not re.match(r"t\d+-numbers", name):  # sensors
            found += re.findall(r"<tr[ >].*?</tr>", body, re.DOTALL)
    return [re.sub(r"<[^>]+>", " ", row) for row in found]


def plots(made: Made) -> list[str]:
    found = re.findall(r"<svg .*?</svg>", made.pages["report.html"], re.DOTALL)
    drawn = [re.sub(r"<(title|desc).*?</\1>", "", plot, flags=re.DOTALL) for plot in found]
    return [plot for plot in drawn if "Seconds from start" not in plot]


def markdown_rows(text: str) -> list[str]:
    """Rows of tables with numbers; what failed and the conditions are none."""
    found = []
    for part in re.split(r"\n(?=##+ )", text):
        if part.startswith(("## Conditions", "### 2026", "## What failed", "## Rows that break")):
            continue
        found += [line for line in part.splitlines() if line.startswith("| ")][2:]
    return found


def json_rows(made: Made) -> list[str]:
    tables = json.loads(made.pages["report.json"])["tables"]
    return [
        json.dumps(row) for name, rows in tables.items() if name not in NO_NUMBERS for row in rows
    ]


def parquet_rows(made: Made) -> list[str]:
    tables = [
        pd.read_parquet(io.BytesIO(content))
        for name, content in made.upload.own.items()
        if name.endswith(".parquet")
    ]
    assert len(tables) == 3
    return [" ".join(map(str, row)) for table in tables for row in table.itertuples(index=False)]


def terminal_rows(made: Made) -> list[str]:
    out = io.StringIO()
    with redirect_stdout(out):
        show_run(Finished(made.run, analyse(made.run), {}, ()))
    # Each row may run over several lines of the terminal; a row begins with its server.
    table = out.getvalue().split("┡")[1].split("└")[0]
    lines = [line.strip("│ \n") for line in table.splitlines()[1:]]
    found: list[str] = []
    for line in lines:
        if re.match(r"(vk|stock)", line):
            found.append("")
        found[-1] += " " + line
    return [re.sub(r"\s+", " ", row.replace("│", " ")) for row in found]


FORMS: dict[str, Callable[[Made], Sequence[str]]] = {
    "html": html_rows,
    "svg": plots,
    "leaderboard.md": lambda made: markdown_rows(made.pages["leaderboard.md"]),
    "card.md": lambda made: markdown_rows(made.pages["card.md"]),
    "csv": lambda made: made.pages["cells.csv"].splitlines()[1:],
    "json": json_rows,
    "benchmark-action": lambda made: [
        json.dumps(entry) for entry in json.loads(made.pages["benchmark-action.json"])
    ],
    "space": lambda made: [made.pages["README.md"]],
    "parquet": parquet_rows,
    "dataset index": lambda made: made.upload.files()["index.jsonl"].decode().splitlines(),
    "dataset card": lambda made: [
        line
        for line in made.upload.files()["README.md"].decode().splitlines()
        if line.startswith("| 2026")
    ],
    "pull request comment": lambda made: [
        line for line in to_markdown(made.gated()).splitlines() if line.startswith("| gated")
    ],
    "verdict.json": lambda made: [json.dumps(c) for c in to_json(made.gated())["cells"]],
    "junit": lambda made: re.findall(r"<testcase.*?</testcase>", to_junit(made.gated()), re.DOTALL),
    "terminal": terminal_rows,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_row_carries_its_words(made: Made, form: str) -> None:
    rows = FORMS[form](made)
    assert rows
    for row in rows:
        for word in made.words:
            assert word in row, row
