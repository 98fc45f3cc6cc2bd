"""matplotlib drawings as inline SVG with the font, ink and colours of the page.

matplotlib draws placeholder colours that become CSS afterwards, so that one drawing suits light and
dark pages: INK becomes currentColor, PAPER the page's colour, series i var(--series-i).
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
OURS, PEER = "#000003", "#000004"  # lines that show the best of several kernels
ROLES: dict[str, dict[str, Any]] = {
    "ours": {"color": OURS, "marker": "o", "linestyle": "-"},
    "peer": {"color": PEER, "marker": "^", "linestyle": (0, (5, 1.5))},
    "dense": {"color": INK, "marker": "s", "linestyle": "-"},
}
COLOURS = 8  # the palette in templates/report.css
SALT = 14893  # gives kernels that share a panel different colours
MARKERS = "os^DvPX*"
HOLLOW: dict[str, Any] = {"linestyle": "none", "markerfacecolor": PAPER, "markeredgewidth": 1.2}
DASHES = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5))]
OCTAVES = 3  # the colours of cells saturate at 8× and 1/8×
PALETTE = seaborn.diverging_palette(25, 245, s=80, l=50, as_cmap=True)
SIZE = (270, 200)  # CSS pixels, before the page scales it
MARGINS = (48, 38, 10, 8)  # pixels left, below, right and above the axes

COLOURED: list[tuple[str, Any]] = [
    (r"#0000(1[0-7])", lambda match: f"var(--series-{int(match[1], 16) - 0x10})"),
    (OURS, "var(--ours)"),
    (PEER, "var(--peer)"),
    (INK, "currentColor"),
    (PAPER, "var(--paper)"),
]

STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sparsebench",  # the same run gives the same bytes
    "text.parse_math": False,  # a label may contain any text, and $ is a dollar
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
    """Return the number of a kernel's look, the same on every page; options change the dashes.

    A backward kernel looks like the forward one, because they never share a panel.
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
    """Make the ids of a page's drawings unique: matplotlib gives equal markers the same id."""
    counted = count(1)

    def unique(drawing: re.Match[str]) -> str:
        number = next(counted)
        return re.sub(r'(id="|#)([mpC][0-9a-f]{8,})', rf"\1\2-{number}", drawing[0])

    return re.sub(r"<svg.*?</svg>", unique, page, flags=re.DOTALL)


def shade(ratio: float) -> tuple[str, str]:
    """Return the colours of a cell and of its text: blue above 1, orange below 1.

    The text is black or white, whichever has the higher contrast (WCAG 2, at least 4.6).
    """
    octaves = float(np.clip(np.log2(ratio), -OCTAVES, OCTAVES))
    colour = PALETTE(0.5 + octaves / OCTAVES / 2)[:3]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    bright = float(np.dot(linear, [0.2126, 0.7152, 0.0722])) > 0.179
    return to_hex(colour), "#000" if bright else "#fff"


def canvas(size: tuple[int, int] = SIZE, fitted: bool = False) -> tuple[Figure, Axes]:
    """Return an empty drawing, to be used inside `style()`.

    `fitted` makes room for long labels and doubles the time to draw.
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
    """Return the context in which drawings are made and written."""
    return matplotlib.rc_context(STYLE)


def svg(figure: Figure, label: str, titles: Mapping[str, Sequence[str]] | None = None) -> Markup:
    """Return a drawing as an SVG element with a label for screen readers.

    titles  by the gid of a line, the tooltips of its markers
    """
    file = StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = _titled(file.getvalue(), titles or {})
    body = text[text.index("</defs>") + len("</defs>") : text.rindex("</svg>")]  # without the style
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
    """Return a sample of a contender's line for a legend; None is the baseline."""
    return _swatch({"color": INK, "linewidth": 1.2} if number is None else series(number))


@cache
def role(name: str) -> Markup:
    """Return a sample of a role's line for a legend."""
    return _swatch({"markersize": 4.2, "linewidth": 1.5, **ROLES[name]})


def roles(names: Mapping[str, str]) -> Markup:
    """Return a legend of roles with their names."""
    items = (Markup("<li>{}{}</li>").format(role(key), name) for key, name in names.items())
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))


@cache
def hollow() -> Markup:
    """Return the marker of an undecided case for a legend."""
    return _swatch({"color": INK, "marker": "o", "markersize": 5} | HOLLOW)


def _titled(text: str, titles: Mapping[str, Sequence[str]]) -> str:
    """Put a title into each marker of these lines."""
    for gid, texts in titles.items():
        head, mark, rest = text.partition(f'<g id="{gid}">')
        for title in texts:
            before, use, after = rest.partition("<use ")
            inside, _, after = after.partition("/>")
            head += mark + before + use + inside + f"><title>{escape(title)}</title></use>"
            mark, rest = "", after
        text = head + rest
    return text


def _swatch(look: dict[str, Any]) -> Markup:
    """Draw 30 × 12 pixels by hand: legends have many samples, and these need no ids."""
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
    """Replace the placeholder colours by those of the page."""
    for pattern, new in COLOURED:
        text = re.sub(pattern, new, text)
    return text
