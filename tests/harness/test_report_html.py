"""report.html: what it says, what it never hides, what it never asks for."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
import report_pages as pages

from finalbench.report import html, phrases
from finalbench.report.tables import all_tables
from finalbench.report.view import Measured, Page


class _Reader(HTMLParser):
    """Collects elements, and the text of each table cell."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._table = ""
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag == "table":
            self._table = found["id"] or ""
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append("")
            self._open = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            self.tables[self._table][-1][-1] += data


def render(page: Page) -> str:
    return html.render(page, all_tables(page))


def read(page: Page) -> tuple[str, _Reader]:
    text = render(page)
    reader = _Reader()
    reader.feed(text)
    return text, reader


@pytest.fixture(scope="module")
def rendered() -> tuple[str, _Reader]:
    return read(pages.page())


def test_the_headline_names_ratio_interval_baseline_and_classes(
    rendered: tuple[str, _Reader],
) -> None:
    text = rendered[0]
    said = text[text.index("<h1") : text.index('<nav class="toc"')]
    for words in ("6.46×", "[6.21, 6.72]", "stock", "real weights", "measured acceptance"):
        assert words in said
    assert "self-reported, unverified" in said
    assert "identical but for 3 ties" in said


def test_it_asks_no_other_host_for_anything(rendered: tuple[str, _Reader]) -> None:
    text, reader = rendered
    assert "default-src 'none'" in text
    for tag, attrs in reader.tags:
        for name in ("src", "href", "action", "poster", "data", "srcset"):
            value = attrs.get(name)
            local = value is None or value.startswith(("#", "data:"))
            assert local, f"<{tag} {name}={value!r}>"
    assert not re.search(r"@import|url\((?!#)", text)


def test_tables_read_without_javascript(rendered: tuple[str, _Reader]) -> None:
    text, reader = rendered
    tables = [attrs for tag, attrs in reader.tags if tag == "table"]
    assert len(tables) == text.count("<caption>")
    heads = [attrs for tag, attrs in reader.tags if tag == "th"]
    assert all(attrs.get("scope") in ("col", "row") for attrs in heads)
    assert len(reader.tables["cells"]) == 1 + len(pages.cells())


def test_every_element_id_is_unique_and_every_reference_resolves(
    rendered: tuple[str, _Reader],
) -> None:
    text, reader = rendered
    ids = [attrs["id"] for _, attrs in reader.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text)
    assert {a or b for a, b in used} <= set(ids)
    labels = [attrs.get("aria-labelledby") for _, attrs in reader.tags]
    assert {part for label in labels if label for part in label.split()} <= set(ids)


def test_every_plot_has_words_and_its_numbers(rendered: tuple[str, _Reader]) -> None:
    text, reader = rendered
    plots = [attrs for tag, attrs in reader.tags if tag == "svg"]
    assert plots
    assert all(attrs.get("role") == "img" for attrs in plots)
    assert text.count("<desc ") == len(plots)
    assert sum(name.endswith("-numbers") for name in reader.tables) == len(plots)


def test_failures_and_violations_are_shown(rendered: tuple[str, _Reader]) -> None:
    reader = rendered[1]
    assert "server died: exit code -9" in reader.tables["failures"][1]
    assert any("client_bound" in cell for cell in reader.tables["violations"][1])


def test_nothing_failed_is_said_only_when_nothing_did() -> None:
    clean = pages.page().model_copy(update={"failures": (), "violations": ()})
    assert "every row within every rule" in render(clean)
    assert "every row within every rule" not in render(pages.page())


@pytest.mark.parametrize("table", ["cells", "board-1", "spread"])
def test_each_number_of_a_random_weight_row_carries_the_words(table: str) -> None:
    reader = read(pages.random_page())[1]
    heads, *rows = reader.tables[table]
    rates = [i for i, head in enumerate(heads) if "tok/s" in head or head.startswith("Ratio")]
    assert rates and rows
    for row in rows:
        for index in rates:
            if any(char.isdigit() for char in row[index]):
                for word in ("random weights", "synthetic acceptance", "unverified"):
                    assert word in row[index], row[index]


def test_a_random_weight_model_is_named_by_its_shape_everywhere() -> None:
    text = render(pages.random_page())
    names = re.findall(r"qwen35-35b-a3b( shape)?", text)
    assert names and all(names)


def test_plots_of_random_rows_say_so() -> None:
    text = render(pages.random_page())
    plots = re.findall(r"<svg .*?</svg>", text, re.DOTALL)
    assert plots
    for plot in plots:
        assert "random weights" in re.sub(r"<(title|desc).*?</\1>", "", plot, flags=re.DOTALL)


def test_hostile_names_and_logs_stay_text() -> None:
    text, reader = read(pages.hostile_page())
    scripts = [attrs for tag, attrs in reader.tags if tag == "script"]
    assert len(scripts) == 2
    assert not [tag for tag, _ in reader.tags if tag == "img"]
    assert not [a for _, attrs in reader.tags for a in attrs if a.startswith("on")]
    assert "alert(1)" in text  # shown, as text
    body = text[text.index('id="data">') + 10 :]
    data = json.loads(body[: body.index("</script>")])
    assert "</script>" in data["headlines"][0]["sentence"]


def test_the_data_block_holds_the_tables(rendered: tuple[str, _Reader]) -> None:
    text = rendered[0]
    body = text[text.index('id="data">') + 10 :]
    data = json.loads(body[: body.index("</script>")])
    first = data["tables"]["cells"][0]
    assert first["decode_tok_s"]["value"] == 492.4
    assert "unverified" in first["decode_tok_s"]["shown"]


def test_the_same_page_gives_the_same_bytes() -> None:
    assert render(pages.page()) == render(pages.page())


def test_an_empty_page_says_so() -> None:
    text = render(Page())
    assert "No headline" in text
    assert "No cell was measured" in text


@pytest.mark.parametrize(
    ("verdict", "words"),
    [("INCONCLUSIVE", "is inconclusive"), ("EQUIVALENT", "as fast as stock"), ("SLOWER", "0.5")],
)
def test_an_unfavourable_verdict_is_not_dressed_up(verdict: str, words: str) -> None:
    lead = pages.headline()
    assert lead.comparison
    ratio = lead.comparison.ratio.model_copy(update={"value": 0.5})
    versus = lead.comparison.model_copy(update={"verdict": verdict, "ratio": ratio})
    said = phrases.headline_sentence(lead.model_copy(update={"comparison": versus}))
    assert words in said
    assert "faster" not in said


def test_a_headline_without_a_ratio_gives_the_reason() -> None:
    lead = pages.headline()
    assert lead.comparison
    none = lead.comparison.ratio.model_copy(
        update={"value": None, "reason": "vk cell is invalid: client_bound"}
    )
    versus = lead.comparison.model_copy(update={"ratio": none})
    said = phrases.headline_sentence(lead.model_copy(update={"comparison": versus}))
    assert "client_bound" in said and "×" not in said


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.02515, "0.02515"), (79.314, "79.31"), (1204.2, "1204"), (0.0, "0"), (None, "–")],
)
def test_significant_digits(value: float | None, text: str) -> None:
    assert phrases.significant(value) == text


def test_a_run_without_a_rate_says_so_and_draws_no_bar() -> None:
    lead = pages.headline()
    none = Measured(reason="invalid: settings_unread: no settings were read back")
    text = render(
        pages.page().model_copy(
            update={
                "headlines": (lead.model_copy(update={"decode_tok_s": none, "comparison": None}),)
            }
        )
    )
    said = text[text.index("<h1") : text.index('<nav class="toc"')]
    assert "No rate for VKAE on vk-tiny: invalid: settings_unread" in said
    assert "tok/s" not in said


@pytest.mark.parametrize(
    ("results", "answer"),
    [
        (("identical", "ties(3)", "not_applicable"), "Yes, in every comparison made"),
        (("identical", "divergent"), "No: 1 of 2 comparisons diverge"),
        (("not_judged", "not_judged", "not_applicable"), "Not known"),
        (("identical", "not_judged"), "1 of 2 comparisons could not be made"),
    ],
)
def test_the_answer_on_equality_counts_only_what_was_judged(
    results: tuple[str, ...], answer: str
) -> None:
    row = pages.page().equality[0]
    rows = tuple(row.model_copy(update={"result": result}) for result in results)
    text = render(pages.page().model_copy(update={"equality": rows}))
    assert answer in text
    if answer != "Yes, in every comparison made":
        assert "Yes, in every comparison made: " not in text or "could not be made" in text
