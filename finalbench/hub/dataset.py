"""The results dataset: its index of runs and the README made from it, the only shared files.

Every other file of a run has a path of its own, so two writers can collide in these two alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Literal

import yaml
from pydantic import ValidationError

from finalbench.errors import BundleBroken
from finalbench.hub.rows import CONFIGS
from finalbench.report.markdown import plain
from finalbench.scenario import Frozen

INDEX_FILE = "index.jsonl"
README_FILE = "README.md"


class IndexRow(Frozen):
    """One run in the index. `headline` carries its classes in words."""

    schema_version: Literal[1] = 1
    run: str
    root: str
    model: str
    hardware: str
    scenario: str
    headline: str
    classes: str
    host: str
    format: Literal["parquet", "jsonl"]


def read_index(text: str) -> tuple[IndexRow, ...]:
    """Errors: `BundleBroken` naming the line that is no index row."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                rows.append(IndexRow.model_validate_json(line))
            except ValidationError as error:
                where = error.errors()[0]
                raise BundleBroken(f"{INDEX_FILE}, line {number}: {where['msg']}") from error
    return tuple(rows)


def merged(rows: Iterable[IndexRow], own: IndexRow) -> tuple[IndexRow, ...]:
    """All rows, ours in place of an older one of the same run, ordered by run."""
    found = {row.run: row for row in rows}
    found[own.run] = own
    return tuple(found[run] for run in sorted(found))


def index_text(rows: Iterable[IndexRow]) -> str:
    return "".join(
        json.dumps(row.model_dump(mode="json"), ensure_ascii=False) + "\n" for row in rows
    )


def readme(repo_id: str, rows: Iterable[IndexRow]) -> str:
    """The dataset card: subsets, runs, how to load, how to check, what it does not prove."""
    rows = tuple(rows)
    # A subset has one format; runs uploaded without pyarrow stay reachable under runs/ only.
    kind = "parquet" if any(row.format == "parquet" for row in rows) else "jsonl"
    configs: list[dict[str, object]] = [
        {"config_name": name, "data_files": f"data/{name}/*.{kind}"} for name in CONFIGS
    ]
    configs[0]["default"] = True
    header = {
        "license": "apache-2.0",
        "pretty_name": f"Inference speed records of {repo_id.split('/')[-1]}",
        "tags": ["benchmark", "inference", "finalbench"],
        "configs": configs,
    }
    table = ["| Run | Model | Hardware | Headline | Classes | Root hash |", "|" + " --- |" * 6]
    table += [
        f"| {plain(row.run)} | {plain(row.model)} | {plain(row.hardware)} | {plain(row.headline)} "
        f"| {plain(row.classes)} | {plain(row.root[:12])} |"
        for row in rows
    ]
    text = yaml.safe_dump(header, sort_keys=False, allow_unicode=True, width=1000)
    parts = [
        f"---\n{text}---",
        f"# {plain(str(header['pretty_name']))}",
        "Sealed records of paired benchmark runs: every number can be derived again from them.",
        "## Runs",
        "\n".join(table),
        "## Load",
        "```python\nfrom datasets import load_dataset\n\n"
        f"load_dataset({repo_id!r}, 'leaderboard')\n```",
        "Subsets: `leaderboard` (one row per place), `cells`, `requests` (timings only).",
        "## Check",
        f"```bash\nfinalbench pull {repo_id}\n```",
        "It fetches the bundles, hashes every file and derives every number from the raw records.",
        "## Limits",
        "A seal shows that records were not changed after sealing. It does not show that the "
        "machine was what it says, nor that anybody else would find the same: rows called "
        "unverified were not repeated elsewhere. `reports/` holds each run's page and card with "
        "its conditions.",
    ]
    return "\n\n".join(parts) + "\n"
