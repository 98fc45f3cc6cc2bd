"""matplotlib drawings as inline SVG with the font, ink and colours of the page.

Colours are drawn as stand-ins and become CSS afterwards, so that one drawing serves light and dark:
INK becomes currentColor, PAPER the page's, the colour of series i becomes var(--series-i).
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from io import StringIO
from itertools import count
from typing import Any

import matplotlib
import numpy as np
import seaborn
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.markers import MarkerStyle

INK = "#000001"
PAPER = "#000002"
OURS, PEER = "#000003", "#000004"  # of lines that are the best of several kernels
ROLES: dict[str, dict[str, Any]] = {
    "ours": {"color": OURS, "marker": "o", "linestyle": "-"},
    "peer": {"color": PEER, "marker": "^", "linestyle": (0, (5, 1.5))},
    "dense": {"color": INK, "marker": "s", "linestyle": "-"},
}
COLOURS = 8  # the palette in templates/report.css
SALT = 14893  # with it, the kernels that meet in a panel have different colours
MARKERS = "os^DvPX*"
HOLLOW: dict[str, Any] = {"linestyle": "none", "markerfacecolor": PAPER, "markeredgewidth": 1.2}
DASHES = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5))]
OCTAVES = 3  # the colours of cells end at 8× and 1/8×
PALETTE = seaborn.diverging_palette(25, 245, s=80, l=50, as_cmap=True)
SIZE = (270, 200)  # CSS pixels, before the page scales it
MARGINS = (48, 38, 10, 8)  # likewise: left, bottom, right, top of the axes

COLOURED: list[tuple[str, Any]] = [
    (r"#0000(1[0-7])", lambda found: f"var(--series-{int(found[1], 16) - 0x10})"),
    (OURS, "var(--ours)"),
    (PEER, "var(--peer)"),
    (INK, "currentColor"),
    (PAPER, "var(--paper)"),
]

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


def looks(kernel: str, options: str = "") -> int:
    """Return the number of a kernel's look, the same on every page; options change its dashes.

    The backward kernels of a family look like its forward one: they are never in one panel.
    """
    stem = kernel.removesuffix("_dgrad").removesuffix("_wgrad")
    colour, marker = hashlib.sha256(f"{SALT} {stem}".encode()).digest()[:2]
    dash = hashlib.sha256(options.encode()).digest()[0] if options else 0
    return colour % COLOURS + COLOURS * (marker % len(MARKERS) + len(MARKERS) * (dash % 4))


def series(number: int) -> dict[str, Any]:
    """Return the look of a contender's line; colour, marker and dashes all differ."""
    rest = number // COLOURS
    return {
        "color": f"#0000{number % COLOURS + 0x10:02x}",
        "marker": MARKERS[rest % len(MARKERS)],
        "linestyle": DASHES[rest // len(MARKERS) % len(DASHES)],
        "markersize": 4.2,
        "linewidth": 1.3,
        "markeredgewidth": 0,
    }


def distinct(page: str) -> str:
    """Return a page whose drawings have different ids: matplotlib names equal markers alike."""
    counted = count(1)

    def own(drawing: re.Match[str]) -> str:
        number = next(counted)
        return re.sub(r'(id="|#)([mpC][0-9a-f]{8,})', rf"\1\2-{number}", drawing[0])

    return re.sub(r"<svg.*?</svg>", own, page, flags=re.DOTALL)


def shade(ratio: float) -> tuple[str, str]:
    """Return the colour of a cell and that of its text: blue above 1, orange below it.

    The text is black or white, whichever has the higher contrast (WCAG 2): 4.6 at least.
    """
    octaves = float(np.clip(np.log2(ratio), -OCTAVES, OCTAVES))
    colour = PALETTE(0.5 + octaves / OCTAVES / 2)[:3]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    bright = float(np.dot(linear, [0.2126, 0.7152, 0.0722])) > 0.179
    return to_hex(colour), "#000" if bright else "#fff"


def canvas(size: tuple[int, int] = SIZE, fitted: bool = False) -> tuple[Figure, Axes]:
    """Return an empty drawing; enter `style()` around all that draws on it.

    `fitted` makes room for long labels, and doubles the time to draw.
    """
    figure = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained" if fitted else None)
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    if not fitted:
        left, bottom, right, top = MARGINS
        ends = left / size[0], bottom / size[1], 1 - right / size[0], 1 - top / size[1]
        figure.subplots_adjust(*ends)
    return figure, axes


def style() -> Any:
    """Return the context in which everything is drawn and written."""
    return matplotlib.rc_context(STYLE)


def svg(figure: Figure, label: str, values: Mapping[str, Sequence[str]] | None = None) -> Markup:
    """Return a drawing as an SVG element, with a label for screen readers.

    `values` are what the markers of a line with this gid say when they are pointed at.
    """
    file = StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = _titled(file.getvalue(), values or {})
    body = text[text.index("</defs>") + len("</defs>") : text.rindex("</svg>")]  # style left out
    changes = [
        (r'<g id="(?:of )([^"]*)">', r'<g class="\1">'),
        (r' id="(?![mpC][0-9a-f_]{8,}")[^"]*"', ""),
        (r'<path d="[^"]*" style="fill: none"/>', ""),  # empty backgrounds
        (r" font-family: [^;]*;", ""),  # the page's
        (r' transform="rotate\(-?0 [^"]*"', ""),
        (r"\n *", "\n"),
    ]
    for pattern, new in changes:
        body = re.sub(pattern, new, body)
    body = _coloured(body)
    box = re.search(r'viewBox="([\d. ]*)"', text)
    head = Markup('<svg viewBox="{}" role="img" aria-label="{}">')
    return head.format(box[1] if box else "", label) + Markup(body + "</svg>")


@cache
def swatch(number: int | None) -> Markup:
    """Return a short piece of a contender's line for a legend; None is the baseline."""
    return _swatch({"color": INK, "linewidth": 1.2} if number is None else series(number))


@cache
def role(name: str) -> Markup:
    """Return a short piece of a role's line for a legend."""
    return _swatch({"markersize": 4.2, "linewidth": 1.5, **ROLES[name]})


def roles(words: Mapping[str, str]) -> Markup:
    """Return a legend of roles and what they are called."""
    items = (Markup("<li>{}{}</li>").format(role(name), said) for name, said in words.items())
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))


@cache
def hollow() -> Markup:
    """Return the marker of an undecided case for a legend."""
    return _swatch({"color": INK, "marker": "o", "markersize": 5} | HOLLOW)


def _titled(text: str, values: Mapping[str, Sequence[str]]) -> str:
    """Put a title into each marker of the lines that have values."""
    for gid, titles in values.items():
        head, mark, rest = text.partition(f'<g id="{gid}">')
        for title in titles:
            before, use, after = rest.partition("<use ")
            inside, _, after = after.partition("/>")
            head += mark + before + use + inside + f"><title>{escape(title)}</title></use>"
            mark, rest = "", after
        text = head + rest
    return text


def _swatch(look: dict[str, Any]) -> Markup:
    """Draw 30 × 12 pixels by hand: a legend has many, and needs no ids for its markers."""
    marker, pattern = MarkerStyle(look.get("marker", "")), look.get("linestyle", "-")
    path = marker.get_path().transformed(marker.get_transform())
    shape: Any = path.to_polygons()
    points = [f"{15 + 5 * x:.1f} {6 - 5 * y:.1f}" for x, y in shape[0]] if shape else []
    dashes = (
        " ".join(f"{1.5 * step:g}" for step in pattern[1]) if pattern not in ("-", "none") else ""
    )
    line = f'<path d="M2 6H28" stroke-dasharray="{dashes}"/>' if pattern != "none" else ""
    mark = f'<path d="M{"L".join(points)}z" fill="{look.get("markerfacecolor", look["color"])}"/>'
    body = f'<svg viewBox="0 0 30 12" aria-hidden="true" stroke="{look["color"]}" fill="none" '
    body += f'stroke-width="{look.get("linewidth", 1.2)}">{line}{mark if points else ""}</svg>'
    return Markup(_coloured(body))


def _coloured(text: str) -> str:
    """Put the page's colours in the place of their stand-ins."""
    for pattern, new in COLOURED:
        text = re.sub(pattern, new, text)
    return text
