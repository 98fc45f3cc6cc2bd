"""The colours, markers and dashes of drawings, their legends, and the colours of cells.

Every colour is a CSS variable of templates/report.css, so that one drawing suits light and dark
pages: --series-0 to --series-7 for contenders, --ours and --peer for roles, currentColor for ink.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import seaborn
from markupsafe import Markup
from matplotlib.colors import to_hex

INK = "currentColor"
PAPER = "var(--paper)"
OURS, PEER = "var(--ours)", "var(--peer)"  # lines that show the best of several kernels
COLOURS = 8  # the palette in templates/report.css
SALT = 14893  # gives kernels that share a panel different colours
MARKERS = "os^DvPX*"
DASHES = ["", "5 1.5", "1.5 1.2", "6 1.5 1.5 1.5"]
OCTAVES = 3  # the colours of cells saturate at 8× and 1/8×
PALETTE = seaborn.diverging_palette(25, 245, s=80, l=50, as_cmap=True)


@dataclass(frozen=True)
class Look:
    """How a line and its markers are drawn.

    marker  a letter of MARKERS, `|` for a tick, or "" for none
    dash    SVG dash lengths; "" draws a solid line, and None no line
    hollow  whether markers show the paper inside
    """

    color: str = INK
    marker: str = ""
    dash: str | None = ""
    width: float = 1.2
    size: float = 4.2
    alpha: float = 1.0
    hollow: bool = False

    def but(self, **changes: object) -> "Look":
        """Return this look with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]


ROLES = {
    "ours": Look(OURS, "o", width=1.6, size=4.6),
    "peer": Look(PEER, "^", "5 1.5", width=1.6, size=4.6),
    "dense": Look(INK, "s", width=1.6, size=4.6),
}


def looks(kernel: str, options: str = "") -> int:
    """Return the number of a kernel's look, the same on every page; options change the dashes.

    A backward kernel looks like the forward one, because they never share a panel.
    """
    stem = kernel.removesuffix("_dgrad").removesuffix("_wgrad")
    colour, marker = hashlib.sha256(f"{SALT} {stem}".encode()).digest()[:2]
    dash = hashlib.sha256(options.encode()).digest()[0] if options else 0
    return colour % COLOURS + COLOURS * (marker % len(MARKERS) + len(MARKERS) * (dash % 4))


def series(number: int) -> Look:
    """Return the look of a contender's line; colour, marker and dashes all differ."""
    rest = number // COLOURS
    dash = DASHES[rest // len(MARKERS) % len(DASHES)]
    return Look(f"var(--series-{number % COLOURS})", MARKERS[rest % len(MARKERS)], dash, 1.3)


def shade(ratio: float) -> tuple[str, str]:
    """Return the colours of a cell and of its text: blue above 1, orange below 1.

    The text is black or white, whichever has the higher contrast (WCAG 2, at least 4.6).
    """
    octaves = float(np.clip(np.log2(ratio), -OCTAVES, OCTAVES))
    colour = PALETTE(0.5 + octaves / OCTAVES / 2)[:3]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    bright = float(np.dot(linear, [0.2126, 0.7152, 0.0722])) > 0.179
    return to_hex(colour), "#000" if bright else "#fff"


SHAPES = {  # corners of the markers, in half sizes
    "s": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "^": [(0, -1.1), (1.05, 0.9), (-1.05, 0.9)],
    "v": [(0, 1.1), (1.05, -0.9), (-1.05, -0.9)],
    "D": [(0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)],
    "P": [(x * s, y * s) for s in (1.1,) for x, y in (
        (-.35, -1), (.35, -1), (.35, -.35), (1, -.35), (1, .35), (.35, .35),
        (.35, 1), (-.35, 1), (-.35, .35), (-1, .35), (-1, -.35), (-.35, -.35))],
    "X": [(x * s, y * s) for s in (1.0,) for x, y in (
        (-1, -.5), (-.5, -1), (0, -.5), (.5, -1), (1, -.5), (.5, 0),
        (1, .5), (.5, 1), (0, .5), (-.5, 1), (-1, .5), (-.5, 0))],
    "*": [(r * np.sin(i * np.pi / 5), -r * np.cos(i * np.pi / 5))
          for i in range(10) for r in (1.35 if i % 2 == 0 else 0.55,)],
    "|": [(-0.14, -1.1), (0.14, -1.1), (0.14, 1.1), (-0.14, 1.1)],
}  # fmt: skip


def mark(marker: str, x: float, y: float, size: float) -> str:
    """Return the SVG shape of a marker, without the end of its tag."""
    half = size / 2
    if marker == "o":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{half:g}"'
    corners = (f"{x + half * dx:.1f} {y + half * dy:.1f}" for dx, dy in SHAPES[marker])
    return f'<path d="M{"L".join(corners)}z"'


def swatch(look: Look) -> Markup:
    """Return a sample of a line for a legend, 30 × 12 pixels."""
    line = "" if look.dash is None else f'<path d="M2 6H28" stroke-dasharray="{look.dash}"/>'
    fill = PAPER if look.hollow else look.color
    shape = f'{mark(look.marker, 15, 6, 2.4 * look.size)} fill="{fill}"/>' if look.marker else ""
    body = f'<svg viewBox="0 0 30 12" aria-hidden="true" stroke="{look.color}" fill="none" '
    return Markup(f'{body}stroke-width="{look.width}">{line}{shape}</svg>')


@cache
def contender_swatch(number: int | None) -> Markup:
    """Return a sample of a contender's line; None is the baseline."""
    return swatch(Look() if number is None else series(number))


def roles(names: Mapping[str, str]) -> Markup:
    """Return a legend of roles with their names."""
    item = Markup("<li>{}{}</li>")
    items = (item.format(swatch(ROLES[key]), name) for key, name in names.items())
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))
