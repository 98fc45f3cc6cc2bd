"""The page "Should I prune?" in Chromium, with and without JavaScript."""

import re
from pathlib import Path
from typing import Any

import pytest

from sparsebench.reports.site import prune
from sparsebench.reports.site.pages import Site
from tests.browser.conftest import SCREENS, write_page

pytestmark = pytest.mark.browser

OTHER = "qwen3-32b-nvidia-h200-64"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    card: Any = type("Card", (), {"gpu": "NVIDIA H200", "name": "ffn", "address": "h200/ffn"})()
    folder = tmp_path_factory.mktemp("prune")
    return write_page(folder, prune.PAGE, dict(prune.pages([card], Site()))[prune.PAGE])


@pytest.mark.parametrize(("width", "colors"), SCREENS)
def test_the_page_fits_logs_nothing_and_axe_finds_nothing(width, colors, page, show) -> None:
    show(page, width, colors).assert_fits(width)


def test_a_select_shows_one_answer(page: Path, show: Any) -> None:
    opened = show(page).page
    assert opened.locator(".advice:visible").get_attribute("id") == "llama-3-8b-nvidia-h200-16"
    opened.locator("select[name=model]").select_option("Qwen3-32B")
    opened.locator("select[name=tokens]").select_option("64")
    assert opened.locator(".advice:visible").get_attribute("id") == OTHER


def test_an_answer_is_a_sentence_a_chart_and_lines_to_copy(page: Path, show: Any) -> None:
    answer = show(page).page.locator(".advice:visible")
    assert "on gemma-3-270m (from a 4-bit file) perplexity rose" in answer.inner_text()
    assert answer.locator("svg:visible").count() == 1
    assert answer.locator(".commands code").count() == 2  # load in fewer bits, and measure
    assert len(show(page).page.locator("main").inner_text().split()) < 220


def test_it_prints_on_two_pages(page: Path, show: Any) -> None:
    """Each page of a PDF is one object of the type Page."""
    assert len(re.findall(rb"/Type /Page\b", show(page, media="print").page.pdf())) <= 2


def test_an_address_shows_one_answer_without_javascript(page: Path, browser: Any) -> None:
    context = browser.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto(page.as_uri())
    opened.locator("#models summary").click()
    opened.locator(f'.map a[href="#{OTHER}"]').click()
    assert opened.locator(".advice:visible").get_attribute("id") == OTHER
    context.close()
