"""The page "From which length on?" in Chromium."""

from pathlib import Path
from typing import Any

import pytest

from sparsebench.reports.site import attention
from sparsebench.reports.site.pages import Site
from tests.browser.conftest import SCREENS, write_page
from tests.results.selection_examples import evidence

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (name, text), _ = attention.pages(Site(prune=True), evidence())
    return write_page(tmp_path_factory.mktemp("attention"), name, text)


@pytest.mark.parametrize(("width", "colors"), SCREENS)
def test_the_page_fits_logs_nothing_and_axe_finds_nothing(
    width: int, colors: str, page: Path, show: Any
) -> None:
    show(page, width, colors).assert_fits(width)
