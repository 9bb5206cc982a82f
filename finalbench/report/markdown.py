"""Page -> Markdown: the leaderboard, and the report card a team can put on the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import yaml

from finalbench.report import phrases
from finalbench.report.entries import Entry, Table
from finalbench.report.view import Headline, Page, RunCard

_SPECIAL = re.compile(r"([\\`*\[\]|])")
_TAG = re.compile(r"[^a-z0-9._-]+")


def plain(text: str) -> str:
    """Text that Markdown shows as it is: one line, no markup, no HTML, no table border."""
    line = " ".join(text.split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", line)


def fence(text: str, language: str = "") -> str:
    """A code block that its own content cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}"


def grid(table: Table) -> str:
    """A Markdown table; columns without a single value are left out."""
    empty = (phrases.MISSING, "")
    kept = [
        index
        for index in range(len(table.columns))
        if any(row[index].plain not in empty for row in table.rows)
    ]
    columns = [table.columns[index] for index in kept]
    lines = [
        _row(plain(column.heading) for column in columns),
        _row("---:" if column.numeric else "---" for column in columns),
    ]
    lines += [_row(_cell(row[index]) for index in kept) for row in table.rows]
    if table.note:
        lines += ["", plain(table.note)]
    return "\n".join(lines)


def leaderboard(page: Page, made: Sequence[Table]) -> str:
    """leaderboard.md: headline, ranking, spread, equality, failures, commands."""
    parts = ["# Leaderboard", *_headlines(page)]
    for table in made:
        parts += [f"## {plain(table.caption)}", grid(table)]
    parts += _reproduce(page.runs)
    return "\n\n".join(parts) + "\n"


def card(page: Page, made: Sequence[Table], configs: Sequence[dict[str, object]] = ()) -> str:
    """card.md: YAML header, results, conditions, limits, provenance, reproduction block."""
    found = {table.id: table for table in made}
    parts = [_header(page, configs), f"# {plain(_title(page))}", *_headlines(page)]
    parts.append("## Results")
    boards = [table for name, table in found.items() if name.startswith("board-")]
    parts += [part for table in boards for part in (f"### {plain(table.caption)}", grid(table))]
    if not boards:
        parts.append("No row can be ranked.")
    for name, heading in (
        ("spread", "What moves the number"),
        ("domains", "By kind of prompt"),
        ("variance", "Where the spread comes from"),
        ("costs", "Why drafts gain what they gain"),
        ("aa", "A/A"),
        ("energy", "Energy"),
        ("equality", "Are the outputs the same?"),
        ("cells", "Every cell"),
    ):
        if name in found:
            parts += [f"## {heading}", grid(found[name])]
    parts.append("## What failed")
    failed = [found[name] for name in ("failures", "violations") if name in found]
    parts += [grid(table) for table in failed] or ["Nothing."]
    parts += ["## Conditions", *(_conditions(run) for run in page.runs)]
    parts += ["## Limits", _bullets(limits(page))]
    parts += ["## Provenance", _bullets(_provenance(run) for run in page.runs)]
    parts += _reproduce(page.runs)
    return "\n\n".join(parts) + "\n"


def space_readme(page: Page) -> str:
    """The README that makes a folder a static Space."""
    document = {
        "title": " ".join(_title(page).split()),
        "sdk": "static",
        "app_file": "index.html",
        "license": "apache-2.0",
    }
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{text}---\n\n" + "\n\n".join(_headlines(page)) + "\n"


def limits(page: Page) -> tuple[str, ...]:
    """What these numbers do not say; only sentences that hold for this page."""
    marks = [cell.marks for cell in page.cells] + [row.marks for b in page.boards for row in b.rows]
    said = [
        "Every rate holds for the stated hardware, settings and prompts only.",
        "A ratio is against the named baseline with its stated settings, not against any other.",
    ]
    if any(mark.weights == "random" for mark in marks):
        said.append(
            "Rows called random weights have the model's shape and not its weights: "
            "they say nothing about its outputs."
        )
    if any(mark.acceptance == "synthetic" for mark in marks):
        said.append(
            "Rows called synthetic acceptance had drafts accepted at a set chance: "
            "the rate is a bound for that chance, not a measurement of the drafter."
        )
    if any(mark.status != "verified" for mark in marks):
        said.append("Rows called unverified were not repeated on another machine by anyone else.")
    said += [note for run in page.runs for note in run.notes]
    if any(not run.root_hash for run in page.runs):
        said.append("At least one run is not sealed: its records could have been edited.")
    return tuple(dict.fromkeys(said))


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(entry: Entry) -> str:
    shown = plain(entry.text)
    shown = f"**{shown}**" if entry.tone == "best" else shown
    notes = phrases.join_words(plain(note) for note in entry.notes)
    return f"{shown} ({notes})" if notes else shown


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {plain(line)}" for line in lines)


def _headlines(page: Page) -> list[str]:
    parts = []
    for headline in page.headlines:
        words = phrases.join_words(phrases.mark_words(headline.marks))
        lines = (
            f"**{plain(phrases.headline_sentence(headline))}**",
            plain(phrases.interval_sentence(headline)),
            f"Classes: {plain(words)}.",
        )
        parts.append("\n".join(line for line in lines if line))
    return parts or ["No headline: no baseline ratio could be formed."]


def _title(page: Page) -> str:
    names = dict.fromkeys(_model_name(headline) for headline in page.headlines)
    shown = ", ".join(names) or ", ".join(m for run in page.runs for m in run.models)
    return f"Decode speed of {shown}" if shown else "Decode speed"


def _model_name(headline: Headline) -> str:
    return phrases.shape_name(headline.model, headline.marks)


def _tag(text: str) -> str:
    return _TAG.sub("-", text.lower()).strip("-.")[:60]


def _header(page: Page, configs: Sequence[dict[str, object]]) -> str:
    models = [_model_name(headline) for headline in page.headlines]
    classes = {word for h in page.headlines for word in phrases.mark_words(h.marks)[:2]}
    tags = ["benchmark", "inference", "finalbench"]
    tags += [_tag(text) for text in (*models, *sorted(classes), *(r.hardware for r in page.runs))]
    document: dict[str, object] = {
        "license": "apache-2.0",
        "pretty_name": " ".join(_title(page).split()),
        "tags": [tag for tag in dict.fromkeys(tags) if tag],
    }
    if configs:
        document["configs"] = list(configs)
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{text}---"


def _conditions(run: RunCard) -> str:
    lines = [f"### {plain(run.id)}", "", "| | | |", "| --- | --- | --- |"]
    lines += [_row(plain(part) for part in (f.group, f.name, f.value)) for f in run.facts]
    if run.bare_loop:
        lines.append(_row(("Baseline", "HTTP cost", plain(run.bare_loop))))
    return "\n".join(lines)


def _provenance(run: RunCard) -> str:
    seal = f"root hash {run.root_hash}" if run.root_hash else "not sealed"
    return (
        f"{run.id}: {run.status}, scenario {run.scenario} ({run.scenario_hash}), {run.hardware}, "
        f"{run.blocks} blocks, {run.requests} requests, {len(run.rolls)} attempts, {seal}"
    )


def _reproduce(runs: Sequence[RunCard]) -> list[str]:
    parts = ["## Reproduce"] if any(run.commands for run in runs) else []
    for run in runs:
        for command in run.commands:
            parts += [f"{plain(command.label)}:", fence(command.text, "bash")]
    return parts
