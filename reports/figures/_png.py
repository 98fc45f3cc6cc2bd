"""The drawings of a page as one PNG, for GitHub and for PDF, which show no page in a page.

    <svg viewBox="0 0 400 235" ...>   ─>  a part of the picture, below the one before
    path d="M26 159.2H358v3z"         ─>  a line, or a filled marker
    circle, text, g                   ─>  the same, with the colours and widths of their groups

_chart.py and _svg.py write no other elements, and absolute M, L, H and V, relative v, and z only.
Colours are those of a light page (templates/report.css).
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from io import BytesIO
from typing import Any
from xml.etree import ElementTree

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, PathPatch
from matplotlib.path import Path as Outline

SVG = re.compile(r"<svg viewBox=.*?</svg>", re.DOTALL)
STEP = re.compile(r"([MLHVvz])([^MLHVvz]*)")
VARIABLE = re.compile(r"--(\w+): (#\w+)")
PIXELS, DOTS = 96, 192  # CSS pixels, and dots of the picture, of an inch
POINT = 72 / PIXELS
ANCHORS: Mapping[str, Any] = {"start": "left", "middle": "center", "end": "right"}


def png(page: str) -> bytes | None:
    """Return the drawings of a page, one below the other; None if it has none."""
    drawings = [ElementTree.fromstring(svg) for svg in SVG.findall(page)]
    if not drawings:
        return None
    sizes = [tuple(map(float, each.attrib["viewBox"].split()[2:])) for each in drawings]
    width, height = max(w for w, _ in sizes), sum(h for _, h in sizes)
    figure, top = Figure((width / PIXELS, height / PIXELS), dpi=DOTS), height
    for drawing, (w, h) in zip(drawings, sizes, strict=True):
        top -= h
        axes = figure.add_axes((0, top / height, w / width, h / height))
        axes.set(xlim=(0, w), ylim=(h, 0))
        axes.axis("off")
        _draw(axes, drawing, {})
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw(axes: Axes, element: ElementTree.Element, outer: Mapping[str, str]) -> None:
    """Draw an element with the attributes of the elements around it."""
    style = {**outer, **element.attrib}
    style["opacity"] = str(float(outer.get("opacity", 1)) * float(element.get("opacity", 1)))
    if element.tag == "path":
        axes.add_patch(PathPatch(_outline(element.attrib["d"]), **_look(style)))
    elif element.tag == "circle":
        x, y, radius = (float(element.attrib[name]) for name in ("cx", "cy", "r"))
        axes.add_patch(Circle((x, y), radius, **_look(style)))
    elif element.tag == "text":
        x, y = float(element.attrib["x"]), float(element.attrib["y"])
        look: dict[str, Any] = {"color": _colour(style["fill"]), "va": "baseline"}
        look |= {"ha": ANCHORS[style.get("text-anchor", "start")]}
        axes.text(x, y, element.text or "", fontsize=POINT * float(style["font-size"]), **look)
    for inner in element:
        _draw(axes, inner, style)


def _outline(steps: str) -> Outline:
    points: list[tuple[float, float]] = []
    codes: list[Any] = []
    for letter, places in STEP.findall(steps):
        numbers = [*map(float, places.split())]
        x, y = points[-1] if points else (0.0, 0.0)
        to = {"H": (*numbers, y), "V": (x, *numbers), "v": (x, y + sum(numbers)), "z": (x, y)}
        points.append(to.get(letter, tuple(numbers)))  # type: ignore[arg-type]
        codes.append({"M": Outline.MOVETO, "z": Outline.CLOSEPOLY}.get(letter, Outline.LINETO))
    return Outline(points, codes)


def _look(style: Mapping[str, str]) -> dict[str, Any]:
    look: dict[str, Any] = {"facecolor": _colour(style["fill"]), "clip_on": False}
    look |= {"edgecolor": _colour(style.get("stroke", "none")), "alpha": float(style["opacity"])}
    width = float(style.get("stroke-width", 1))
    look["linewidth"] = POINT * width
    if (dashes := style.get("stroke-dasharray")) and width:
        look["linestyle"] = (0, [float(dash) / width for dash in dashes.split()])
    return look


def _colour(value: str) -> str:
    name = value.removeprefix("var(--").removesuffix(")")
    return _light().get("ink" if value == "currentColor" else name, value)


@cache
def _light() -> dict[str, str]:
    """Return the colours of a light page, which the style sheet names first."""
    css = files("sparsebench.reports").joinpath("templates/report.css").read_text("utf-8")
    return dict(reversed([*VARIABLE.findall(css)]))
