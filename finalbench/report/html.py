"""Page -> report.html: one offline file that reads without JavaScript and asks no other host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from finalbench.report import figures, gallery, phrases, plots
from finalbench.report.entries import Table
from finalbench.report.export import page_document
from finalbench.report.view import Headline, Page, RunCard

_LEAD_KEYS = ("arm", "who", "cell", "comparison", "series")
_SECTIONS = (
    "spread",
    "domains",
    "variance",
    "costs",
    "aa",
    "energy",
    "equality",
    "failures",
    "violations",
    "claims",
    "cells",
)


def render(page: Page, made: Sequence[Table]) -> str:
    """The whole document from a page and its tables; the same bytes for the same page."""
    template = _environment().get_template("report.html.j2")
    found = {table.id: table for table in made}
    groups = [
        {
            "title": group.title,
            "figures": [
                {
                    "title": figure.title,
                    "note": figure.note,
                    "caution": figure.caution,
                    "svg": Markup(plots.svg(figure)),
                    "numbers": figures.numbers(figure),
                }
                for figure in group.figures
            ],
        }
        for group in gallery.groups(page)
    ]
    boards = [table for name, table in found.items() if name.startswith("board-")]
    broken = len(page.failures) + sum(v.severity == "invalid" for v in page.violations)
    return template.render(
        title=_title(page),
        when=_when(page),
        style=Markup(_asset("style.css")),
        script=Markup(_asset("script.js")),
        heroes=[_hero(headline, _tag(page, headline.run_id)) for headline in page.headlines],
        no_headline=_no_headline(page),
        links=_links(page, broken),
        boards=boards,
        figure_groups=groups,
        equality_intro=_equality_intro(page),
        nothing_failed=_nothing_failed(page),
        runs=[_run(run, _tag(page, run.id)) for run in page.runs],
        data=Markup(_script_safe(page_document(page, made))),
        lead=_lead,
        **{name: found.get(name) for name in _SECTIONS},
    )


@cache
def _asset(name: str) -> str:
    return files("finalbench.report.templates").joinpath(name).read_text(encoding="utf-8").strip()


@cache
def _environment() -> Environment:
    loader = DictLoader({"report.html.j2": _asset("report.html.j2")})
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined)


def _script_safe(document: dict[str, Any]) -> str:
    """JSON that cannot end its own script element, nor open a comment in it."""
    text = json.dumps(document, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _lead(table: Table) -> int:
    """The column that names a row: the first of the naming keys, else the first column."""
    keys = [column.key for column in table.columns]
    return next((keys.index(key) for key in _LEAD_KEYS if key in keys), 0)


def _title(page: Page) -> str:
    if not page.headlines:
        return "finalbench report"
    first = page.headlines[0]
    name = phrases.shape_name(first.model, first.marks)
    return f"{name}: {first.arm_label} | finalbench report"


def _when(page: Page) -> str:
    if len(page.runs) == 1:
        return page.runs[0].id
    return f"{len(page.runs)} runs"


def _tag(page: Page, run_id: str) -> str:
    """`Run 2` where there are several: the number that the plots use."""
    ids = [run.id for run in page.runs]
    return f"Run {ids.index(run_id) + 1}" if len(ids) > 1 and run_id in ids else ""


def _no_headline(page: Page) -> str:
    states = sorted({run.status for run in page.runs})
    return f"no baseline ratio could be formed ({', '.join(states) or 'no runs'})."


def _chips(headline: Headline) -> list[dict[str, str]]:
    marks = headline.marks
    same = {"identical": "good", "ties": "good", "divergent": "bad"}
    tones = (
        "good" if marks.weights == "real" else "care",
        "good" if marks.acceptance == "measured" else "care",
        same.get(marks.equality.split("(")[0], "care") if marks.weights == "real" else "care",
        "good" if marks.status == "verified" else "care",
    )
    words = phrases.mark_words(marks)
    return [{"text": text, "tone": tone} for text, tone in zip(words, tones, strict=True)]


def _hero(headline: Headline, run: str) -> dict[str, Any]:
    versus = headline.comparison
    mine = headline.decode_tok_s.value or 0.0
    base = (versus.against_decode_tok_s or 0.0) if versus else 0.0
    top = max(mine, base) or 1.0
    bars = [_bar(headline.arm_label, mine, top, "mine")] if mine else []
    ratio = note = ""
    if versus and versus.ratio.value is not None:
        bars.append(_bar(versus.against_label, base, top, "base"))
        ratio = phrases.times(versus.ratio.value)
        words = (
            f"{phrases.between(versus.ratio.interval, 'times')} vs {versus.against_label}",
            phrases.caution(headline.marks),
        )
        note = phrases.join_words(words)
    return {
        "sentence": phrases.headline_sentence(headline),
        "interval": phrases.interval_sentence(headline),
        "caution": phrases.caution(headline.marks),
        "chips": _chips(headline),
        "ratio": ratio,
        "ratio_note": note,
        "bars": bars,
        "facts": _hero_facts(headline, run),
    }


def _bar(label: str, value: float, top: float, tone: str) -> dict[str, str]:
    width = f"{100 * value / top:.2f}"
    return {"label": label, "width": width, "text": f"{phrases.tok_s(value)} tok/s", "tone": tone}


def _hero_facts(headline: Headline, run: str) -> str:
    facts = [run, headline.setting]
    if headline.acceptance_length is not None:
        length = phrases.significant(headline.acceptance_length, 3)
        facts.append(f"acceptance length {length} tokens a round")
    if headline.bandwidth_share is not None:
        facts.append(f"{phrases.share(headline.bandwidth_share)} of the memory bandwidth limit")
    return phrases.join_words(facts)


def _links(page: Page, broken: int) -> list[dict[str, Any]]:
    entries: list[tuple[str, str, int | None, bool]] = [
        ("leaderboard", "Leaderboard", None, False),
        ("curves", "What moves it", None, False),
        ("equal", "Equality", None, False),
        ("failed", "Failures", broken, broken > 0),
        ("cells-all", "Every cell", len(page.cells), False),
        ("provenance", "Provenance", None, False),
        ("reproduce", "Reproduce", None, False),
    ]
    if page.claims:
        entries.insert(4, ("claimed", "Claims", len(page.claims), False))
    return [{"id": i, "text": t, "count": c, "bad": b} for i, t, c, b in entries]


def _equality_intro(page: Page) -> str:
    """The answer in one sentence; what was not judged is never counted as equal."""
    rows = [row for row in page.equality if row.result != "not_applicable"]
    open_rows = [row for row in rows if row.result == "not_judged"]
    bad = [row for row in rows if row.result.startswith("divergent")]
    positions = sum(row.positions for row in rows)
    ties = sum(row.ties for row in rows)
    judged = f"{positions:,} token positions of timed requests were judged"
    if ties:
        judged += f", {ties} of them ties within the bound"
    left = f" {len(open_rows)} of {len(rows)} comparisons could not be made." if open_rows else ""
    if bad:
        return f"No: {len(bad)} of {len(rows)} comparisons diverge; {judged}.{left}"
    if len(open_rows) == len(rows):
        return "Not known: no comparison could be made." if rows else ""
    return f"Yes, in every comparison made: {judged}.{left}"


def _nothing_failed(page: Page) -> str:
    requests = sum(cell.requests for cell in page.cells)
    return (
        f"Nothing: {len(page.cells)} cells, {requests:,} timed requests, "
        "every row within every rule."
    )


def _run(run: RunCard, tag: str) -> dict[str, Any]:
    facts = sorted(enumerate(run.facts), key=lambda pair: _group_order(run, pair[1].group))
    grouped = [
        (name, [fact for _, fact in members])
        for name, members in groupby(facts, key=lambda pair: pair[1].group)
    ]
    summary = phrases.join_words(
        (
            f"scenario {run.scenario} ({run.scenario_hash})",
            ", ".join(run.models),
            run.hardware,
            f"{run.blocks} blocks",
            f"{run.requests:,} requests",
            run.bare_loop or "",
            f"root hash {run.root_hash}" if run.root_hash else "not sealed",
        )
    )
    title = f"{tag}: {run.id}" if tag else run.id
    return {**dict(run), "title": title, "summary": summary, "fact_groups": grouped}


def _group_order(run: RunCard, name: str) -> int:
    return [fact.group for fact in run.facts].index(name)
