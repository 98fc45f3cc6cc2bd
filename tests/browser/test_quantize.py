"""The page "Prune or quantize?" in Chromium."""

from pathlib import Path
from typing import Any

import pytest

from sparsebench.reports.site import quantize
from sparsebench.reports.site.pages import Site
from sparsebench.reports.site.prune import FIRST
from tests.browser.conftest import SCREENS, write_page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantize")
    return write_page(folder, quantize.PAGE, quantize.page(Site(prune=True), FIRST))


@pytest.mark.parametrize(("width", "colors"), SCREENS)
def test_the_page_fits_logs_nothing_and_axe_finds_nothing(width, colors, page, show) -> None:
    show(page, width, colors).assert_fits(width)


def test_a_select_shows_another_model_on_another_gpu(page: Path, show: Any) -> None:
    opened = show(page).page
    opened.locator("select[name=model]").select_option("Qwen3-32B")
    opened.locator("select[name=gpu]").select_option("NVIDIA H100 80GB HBM3")
    shown = opened.locator(".advice:visible")
    assert shown.get_attribute("id") == "qwen3-32b-nvidia-h100-80gb-hbm3"
    assert shown.locator("tbody tr").count() > 10
    assert "Quantize, do not prune" in shown.inner_text()
