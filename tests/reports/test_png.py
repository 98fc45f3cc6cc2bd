"""Drawings of a page as a picture: sizes, colours, and every element that they are made of."""

import re
from io import BytesIO
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

import sparsebench
from sparsebench.errors import ResultError
from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._png import DOTS, PIXELS, SVG, png
from sparsebench.reports.figures._svg import OURS, PEER, ROLES, Look
from tests.tools.paths import PUBLISHED

DRAWN = {"svg", "g", "title", "path", "circle", "text"}


def chart(look: Look) -> str:
    drawing = Chart((200, 100), "tokens", "speedup")
    drawing.line([1, 2, 3], [1, 2, 1.5], look, name="ours")
    drawing.spans([1, 2], [0.9, 1.9], [1.1, 2.1], look)
    return str(drawing.svg("a chart"))


def has_colour(picture: bytes, colour: str) -> bool:
    pixels = np.round(255 * imread(BytesIO(picture))[..., :3]).astype(int)
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return bool((abs(pixels - wanted).max(-1) <= 2).any())


def test_drawings_lie_below_each_other_in_the_colours_of_a_light_page() -> None:
    ours, peer = chart(ROLES["ours"]), chart(ROLES["peer"])
    picture = png(f"<p>text</p>{ours}<table></table>{peer}")
    assert picture is not None
    scale = DOTS // PIXELS
    assert imread(BytesIO(picture)).shape[:2] == (2 * 100 * scale, 200 * scale)
    assert has_colour(picture, "#0063a6")
    assert has_colour(picture, "#c24e00")
    alone = png(ours)
    assert alone is not None
    assert not has_colour(alone, "#c24e00")
    assert (OURS, PEER) == ("var(--ours)", "var(--peer)")


def test_a_page_of_tables_has_no_picture() -> None:
    assert png("<table></table>") is None


@pytest.mark.parametrize("name", ["quick", "power", "attention-select"])
def test_the_figures_of_a_run_are_made_of_elements_that_are_drawn(name: str) -> None:
    run, drawings = sparsebench.load(PUBLISHED / "nvidia-h200" / name), []
    for figure in run.plots:
        try:
            drawings += SVG.findall(run.plot(figure).html)
        except ResultError:  # it does not apply
            continue
    assert drawings
    for drawing in map(ElementTree.fromstring, drawings):
        for element in drawing.iter():
            assert element.tag in DRAWN
            steps = re.sub(r"[-\d. ]", "", element.get("d", ""))
            assert set(steps) <= set("MLHVvz")
