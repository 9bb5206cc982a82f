"""report.html in headless Chromium: sort, filter, modes, widths, no request, sound to axe-core.

Needs Debian's `chromium` and, for the accessibility check, `npm` to fetch axe-core into a
temporary folder.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import report_pages as pages
from playwright.sync_api import Browser, sync_playwright
from playwright.sync_api import Page as Tab

from finalbench.report import html
from finalbench.report.tables import all_tables
from finalbench.report.view import Page

pytestmark = pytest.mark.browser

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
AXE = "axe-core@4.10.3"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip("needs Debian's chromium: apt-get install -y chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("npm") is None:
        pytest.skip("needs npm to fetch axe-core")
    folder = tmp_path_factory.mktemp("axe")
    subprocess.run(
        ["npm", "install", "--no-save", "--ignore-scripts", "--silent", AXE],
        cwd=folder,
        check=True,
        timeout=120,
    )
    return (folder / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")


class Visit:
    """One tab on one page, with everything it asked for and complained about."""

    def __init__(self, browser: Browser, folder: Path, page: Page, **context: Any) -> None:
        path = folder / "report.html"
        path.write_text(html.render(page, all_tables(page)), encoding="utf-8")
        self.context = browser.new_context(**context)
        self.tab: Tab = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.goto(path.as_uri())

    def column(self, table: str, key: str) -> list[str]:
        index = self.tab.evaluate(
            "([t, k]) => [...document.querySelectorAll(`#${t} thead th`)]"
            ".findIndex(h => h.dataset.key === k)",
            [table, key],
        )
        cells = self.tab.locator(f"#{table} tbody tr > :nth-child({index + 1})")
        return [text.split("\n")[0].strip() for text in cells.all_inner_texts()]

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def visit(browser: Browser, tmp_path: Path) -> Iterator[Visit]:
    opened = Visit(browser, tmp_path, pages.page(), viewport={"width": 1280, "height": 900})
    yield opened
    opened.close()


def test_no_console_message_and_no_request(visit: Visit) -> None:
    visit.tab.wait_for_timeout(300)
    assert visit.complaints == []
    assert [url for url in visit.requests if not url.startswith("file:")] == []
    assert len(visit.requests) == 1


def test_a_header_button_sorts_by_number_both_ways(visit: Visit) -> None:
    head = visit.tab.locator('#cells th[data-key="seq_len"]')
    before = visit.column("cells", "seq_len")
    assert before != sorted(before, key=int)
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    up = visit.column("cells", "seq_len")
    assert up == sorted(before, key=int)
    head.get_by_role("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert visit.column("cells", "seq_len") == sorted(before, key=int, reverse=True)


def test_missing_values_sort_last_in_both_directions(visit: Visit) -> None:
    button = visit.tab.locator('#cells th[data-key="acceptance_length"]').get_by_role("button")
    for _ in range(2):
        button.click()
        column = visit.column("cells", "acceptance_length")
        first_gap = column.index("–")
        assert first_gap > 0
        assert set(column[first_gap:]) == {"–"}


def test_the_filter_hides_rows_and_counts_them(visit: Visit) -> None:
    box = visit.tab.get_by_label("Filter rows of Every cell")
    box.fill("ngram")
    shown = visit.tab.locator("#cells tbody tr:visible")
    assert shown.count() == 1
    assert "ngram k=3" in shown.first.inner_text()
    assert (
        visit.tab.locator("#cells-frame output").inner_text() == f"1 of {len(pages.cells())} rows"
    )
    box.fill("")
    assert shown.count() == len(pages.cells())


def test_without_javascript_every_row_is_there(browser: Browser, tmp_path: Path) -> None:
    opened = Visit(browser, tmp_path, pages.page(), java_script_enabled=False)
    assert opened.tab.locator("#cells tbody tr:visible").count() == len(pages.cells())
    assert opened.tab.locator("#cells thead button").count() == 0
    assert opened.tab.locator("svg[role=img]").count() >= 6
    opened.close()


def _brightness(tab: Tab, script: str) -> float:
    colour = tab.evaluate(script)
    numbers = [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return sum(numbers) / 3


def test_dark_mode_turns_page_and_plots(browser: Browser, tmp_path: Path) -> None:
    found = {}
    for scheme in ("light", "dark"):
        opened = Visit(browser, tmp_path, pages.page(), color_scheme=scheme)
        page = "getComputedStyle(document.body).backgroundColor"
        text = "getComputedStyle(document.querySelector('svg text')).fill"
        found[scheme] = (_brightness(opened.tab, page), _brightness(opened.tab, text))
        opened.close()
    assert found["light"][0] > 200 > 100 > found["light"][1]
    assert found["dark"][0] < 60 < 140 < found["dark"][1]


@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_narrow_screen_never_scrolls_sideways(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    opened = Visit(browser, tmp_path, pages.page(), viewport={"width": width, "height": 800})
    assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width
    opened.close()


def test_hostile_text_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    opened = Visit(browser, tmp_path, pages.hostile_page())
    dialogs: list[str] = []
    opened.tab.on("dialog", lambda dialog: dialogs.append(dialog.message))
    opened.tab.reload()
    opened.tab.wait_for_timeout(200)
    assert dialogs == []
    assert opened.tab.locator("main img").count() == 0
    assert opened.complaints == []
    opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["page", "random_page"])
def test_axe_finds_nothing_serious(
    browser: Browser, tmp_path: Path, axe: str, scheme: str, name: str
) -> None:
    page: Page = getattr(pages, name)()
    # axe is injected by the test, so only here the page's own policy is set aside.
    opened = Visit(browser, tmp_path, page, color_scheme=scheme, bypass_csp=True)
    opened.tab.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    opened.tab.evaluate(axe)
    found = opened.tab.evaluate("axe.run()")
    serious = [
        (rule["id"], rule["impact"], [node["html"][:160] for node in rule["nodes"][:3]])
        for rule in found["violations"]
        if rule["impact"] in ("moderate", "serious", "critical")
    ]
    assert serious == []
    assert found["passes"]
    opened.close()


def copied(tab: Tab, select: str) -> str:
    """What a person pastes after selecting with `select` (a script) and pressing Ctrl+C."""
    tab.evaluate(select)
    tab.keyboard.press("Control+C")
    tab.evaluate(
        "document.body.append(Object.assign(document.createElement('textarea'), {id: 'paste'}));"
        "document.getElementById('paste').focus()"
    )
    tab.keyboard.press("Control+V")
    text = tab.locator("#paste").input_value()
    tab.evaluate("document.getElementById('paste').remove()")
    return text


CELL = (
    "getSelection().selectAllChildren(document.querySelector("
    "'#{table} tbody tr').cells[[...document.querySelectorAll('#{table} thead th')]"
    ".findIndex(h => h.dataset.key === '{key}')])"
)
WORDS = ("random weights", "synthetic acceptance", "unverified")


@pytest.fixture(scope="module")
def random_visit(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visit]:
    opened = Visit(browser, tmp_path_factory.mktemp("random"), pages.random_page())
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("cells", "decode_tok_s", "601.0"),
        ("cells", "acceptance_length", "2.11"),
        ("cells", "bandwidth_share", "31.0 %"),
        ("board-1", "ratio", "×"),
        ("board-1", "bandwidth_share", "31.0 %"),
        ("spread", "factor", "×"),
    ],
)
def test_a_copied_cell_takes_its_words_along(
    random_visit: Visit, table: str, key: str, value: str
) -> None:
    text = copied(random_visit.tab, CELL.replace("{table}", table).replace("{key}", key))
    assert value in text
    for word in WORDS:
        assert text.count(word) == 1, text


def test_a_copied_part_of_a_number_takes_its_words_along(random_visit: Visit) -> None:
    for place in ("#cells tbody td.n[data-v='601.0']", ".ratio b"):
        select = f'getSelection().selectAllChildren(document.querySelector("{place}"))'
        first_text = "; getSelection().setBaseAndExtent(...(n => [n, 0, n, 3])("
        select += first_text + f'document.querySelector("{place}").firstChild))'
        text = copied(random_visit.tab, select)
        assert all(word in text for word in WORDS), text
        assert len(text) < 80


def test_text_of_no_row_and_verified_rows_are_copied_as_they_are(
    browser: Browser, tmp_path: Path, random_visit: Visit
) -> None:
    heading = "getSelection().selectAllChildren(document.querySelector('#equal h2'))"
    assert copied(random_visit.tab, heading) == "Are the outputs the same?"
    sound = pages.Marks(equality="identical", status="verified")
    verified = tuple(c.model_copy(update={"marks": sound}) for c in pages.cells())
    page = pages.page().model_copy(update={"cells": verified})
    opened = Visit(browser, tmp_path, page)
    key = CELL.replace("{table}", "cells").replace("{key}", "decode_tok_s")
    assert "verified" not in copied(opened.tab, key)
    opened.close()


def test_print_shows_every_number(browser: Browser, tmp_path: Path) -> None:
    opened = Visit(browser, tmp_path, pages.page())
    opened.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    opened.tab.emulate_media(media="print")
    assert opened.tab.locator("details:not([open])").count() == 0
    assert opened.tab.locator(".tools:visible").count() == 0
    assert len(opened.tab.pdf()) > 20_000
    opened.close()
