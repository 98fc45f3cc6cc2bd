"""The search over cells in Chromium finds what `sparsebench find` does."""

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from sparsebench.reports import cells
from sparsebench.reports.page import content, render
from sparsebench.reports.site.pages import Site, stylesheet
from tests.browser.conftest import SCREENS

pytestmark = pytest.mark.browser

QUERIES = [
    "2:4 14336x4096 m=64 H100",
    "2:4 H200",
    "14336 × 4096, 64 tokens H100 linear",
    "half 2:4 51200x5120 fp8 H200",
    "bsr 4096x4096 90% block=64",
    "attention 16384 90 % H100",
    "decoder llama-3-8b H100",
    "2:4 m=3 n=100 k=100 H200",
    "spense_wgmma fp8",
    "2:4 fp8 51200x5120 H100",
    "2:4 ffn m=64 H200",
    "int4 2:4 H100",
    "csr activations H200",
    "csr qwen3-32b",
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("find")
    every = cells.packaged_cells()
    texts = {"style.css": stylesheet(), "cells.js": cells.script(every)}
    texts |= {name: content(name) for name in ("report.js", "find.js")}
    texts["find.html"] = render("site_find.html", site=Site(), count=len(every), finds=True)
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    return folder / "find.html"


@pytest.mark.parametrize(("width", "colors"), SCREENS)
def test_the_page_fits_logs_nothing_and_axe_finds_nothing(width, colors, page, show) -> None:
    seen = show(page, width, colors)
    seen.page.locator("main input").fill("bsr m=64")
    seen.assert_fits(width)


def test_page_and_command_find_the_same(page: Path, show: Any) -> None:
    opened = show(page).page
    for query in QUERIES:
        opened.locator("main input").fill(query)
        result, shown = cells.find(cells.packaged_cells(), query), opened.locator("#finds")
        assert shown.locator("section h2").inner_text() == result.cells[0]["head"], query
        text = shown.inner_text()
        assert result.cells[0]["answer"] in text
        assert result.command in text
        assert all(differs in text for differs in result.differs)
        if result.cells[1:]:
            assert f"{len(result.cells)} cells fit" in text


def test_a_word_that_no_cell_has_is_named(page: Path, show: Any) -> None:
    opened = show(page).page
    opened.locator("main input").fill("2:4 foo")
    assert "No published cell has “foo”" in opened.locator("#finds").inner_text()


def test_the_address_holds_the_query(page: Path, browser: Any) -> None:
    opened = browser.new_page()
    opened.goto(f"{page.as_uri()}?{urlencode({'q': '2:4 H200'})}")
    assert opened.locator("main input").input_value() == "2:4 H200"
    assert opened.locator("#finds section h2").inner_text().startswith("2:4: ")
    opened.close()
