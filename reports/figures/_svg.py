"""matplotlib drawings as inline SVG with the font, ink and colours of the page.

Colours are drawn as stand-ins and become CSS afterwards, so that one drawing serves light and dark:
INK becomes currentColor, PAPER the page's, the colour of series i becomes var(--series-i).
"""

import hashlib
import re
from functools import cache
from io import StringIO
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

INK = "#000001"
PAPER = "#000002"
COLOURS = 8  # the palette in templates/report.css
MARKERS = "os^DvPX*"
HOLLOW: dict[str, Any] = {"linestyle": "none", "markerfacecolor": PAPER, "markeredgewidth": 1.2}
DASHES = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5))]
SIZE = (270, 200)  # CSS pixels, before the page scales it

STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sparsebench",  # the same run draws the same bytes
    "text.parse_math": False,  # a label may hold any text: $ is a dollar
    "font.size": 10,
    "axes.linewidth": 0.8,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def series(number: int) -> dict[str, Any]:
    """Return the look of a contender's line; colour, marker and dashes all differ."""
    return {
        "color": f"#0000{number % COLOURS + 0x10:02x}",
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": DASHES[number // COLOURS % len(DASHES)],
        "markersize": 4.2,
        "linewidth": 1.5,
        "markeredgewidth": 0,
    }


def canvas(size: tuple[int, int] = SIZE) -> tuple[Figure, Axes]:
    """Return an empty drawing; enter `style()` around all that draws on it."""
    figure = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.add_subplot()


def style() -> Any:
    """Return the context in which everything is drawn and written."""
    return matplotlib.rc_context(STYLE)


def svg(figure: Figure, label: str) -> Markup:
    """Return a drawing as an SVG element, with a label for screen readers."""
    file = StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    body = text[text.index("</defs>") + len("</defs>") : text.rindex("</svg>")]  # style left out
    changes: list[tuple[str, Any]] = [
        (r'<g id="[^"]*">', "<g>"),
        (r'<path d="[^"]*" style="fill: none"/>', ""),  # empty backgrounds
        (r" font-family: [^;]*;", ""),  # the page's
        (r' transform="rotate\(-?0 [^"]*"', ""),
        (r"#0000(1[0-7])", lambda found: f"var(--series-{int(found[1], 16) - 0x10})"),
        (INK, "currentColor"),
        (PAPER, "var(--paper)"),
        (r"\n *", "\n"),
    ]
    for pattern, new in changes:
        body = re.sub(pattern, new, body)
    tag = hashlib.sha256((label + body).encode()).hexdigest()[:8]  # ids are the whole page's
    body = re.sub(r'(id="|#)([mpC][0-9a-f_]{8,})', rf"\1\2-{tag}", body)
    box = re.search(r'viewBox="([\d. ]*)"', text)
    head = Markup('<svg viewBox="{}" role="img" aria-label="{}">')
    return head.format(box[1] if box else "", label) + Markup(body + "</svg>")


@cache
def swatch(number: int | None) -> Markup:
    """Return a short piece of a contender's line for a legend; None is the baseline."""
    return _swatch({"color": INK, "linewidth": 1.2} if number is None else series(number))


@cache
def hollow() -> Markup:
    """Return the marker of an undecided case for a legend."""
    return _swatch({"color": INK, "marker": "o", "markersize": 5} | HOLLOW)


def _swatch(look: dict[str, Any]) -> Markup:
    with style():
        figure = Figure(figsize=(30 / 72, 12 / 72))
        figure.add_artist(Line2D([0.08, 0.5, 0.92], [0.5, 0.5, 0.5], markevery=[1], **look))
        return svg(figure, "")
