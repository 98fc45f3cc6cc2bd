"""The colours and markers of drawings, and the colours of cells.

Every colour of a drawing is a CSS variable of templates/report.css, so that one drawing suits light
and dark pages: --ours and --peer for roles, currentColor for ink.
"""

from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup
from matplotlib.colors import LinearSegmentedColormap, to_hex

INK, PAPER = "currentColor", "var(--paper)"
OURS, PEER = "var(--ours)", "var(--peer)"
OCTAVES = 3  # the colours of cells saturate at 8× and 1/8×
PALETTE = LinearSegmentedColormap.from_list("gains", ["#bb5c33", "#f1f1f2", "#3c7bb3"])


@dataclass(frozen=True)
class Look:
    """How a line and its markers are drawn.

    marker  a letter of SHAPES, `o` for a circle, or "" for none
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
    "D": [(0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)],
    "|": [(-0.14, -1.1), (0.14, -1.1), (0.14, 1.1), (-0.14, 1.1)],
}


def mark(look: Look, x: float, y: float, title: str = "") -> Markup:
    """Return a marker as an SVG shape, with a tooltip unless the title is empty."""
    half = look.size / 2
    tip = Markup("<title>{}</title>").format(title) if title else ""
    if look.marker == "o":
        return Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{:g}">{}</circle>').format(
            x, y, half, tip
        )
    corners = (f"{x + half * dx:.1f} {y + half * dy:.1f}" for dx, dy in SHAPES[look.marker])
    return Markup('<path d="M{}z">{}</path>').format("L".join(corners), tip)
