"""The page of `new-gpu` in Chromium: it answers on one screen, and cells lead to their cases."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparsebench.harness.new_gpu import survey as surveys
from sparsebench.reports.survey_page import write
from tests.harness.test_new_gpu import SUITE, silent
from tests.simulated.in_process import in_this_process

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a survey of six problems on a simulated GPU."""
    folder = tmp_path_factory.mktemp("survey")
    (folder / "core.yaml").write_text(SUITE)
    with pytest.MonkeyPatch.context() as patch:
        in_this_process(patch)
        for name, value in (("SUITE", str(folder / "core.yaml")), ("PAGE_S", 0.0)):
            patch.setattr(surveys, name, value)
        survey = surveys.survey("sim:l4", 120.0, folder / "survey", silent)
        file = survey.path / "kernels.json"
        first, *rest = json.loads(file.read_text())
        older = {"supported": 0, "reason": "expected compute capability 9.0, found 8.9"}
        file.write_text(json.dumps([first | older, *rest]))
        write(survey.path, [])
    return survey.path / "report.html"


@pytest.mark.parametrize("colors", ["light", "dark"])
def test_axe_finds_nothing(colors: str, page: Path, show: Any) -> None:
    assert not show(page, colors=colors).violations()[:5]


@pytest.mark.parametrize("width", [1280, 400])
def test_the_first_screen_has_the_finding_and_the_grid(width: int, page: Path, show: Any) -> None:
    seen = show(page, width)
    for place in (".finding", "#answer .map"):
        box = seen.page.locator(place).first.bounding_box()
        assert box["y"] + box["height"] <= 800
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert not seen.errors


def test_every_cell_leads_to_its_case(page: Path, show: Any) -> None:
    links = show(page).page.eval_on_selector_all(
        "#answer a.cell", "cells => cells.map(cell => cell.getAttribute('href'))"
    )
    assert links
    for link in links:
        file, _, name = link.partition("#")
        assert f'id="{name}"' in (page.parent / file).read_text()


def test_it_says_that_portable_kernels_took_part(page: Path, show: Any) -> None:
    assert "compute capability 9.0" in show(page).page.inner_text("#answer")
