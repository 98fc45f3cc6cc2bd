"""Small multiples: a quantity against the swept field; lines are contenders, panels are shapes.

log2 y │   ●──●──○      band: the interval, or the range or quartiles; hollow: undecided
     1 ┼──────────── baseline
       └─────────── x: sparsity on a log scale of density, or m ...
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import ArrayLike, NDArray

from sparsebench.reports.figures._figure import Frames
from sparsebench.reports.figures._html import folded
from sparsebench.reports.figures._svg import (
    HOLLOW,
    INK,
    canvas,
    hollow,
    series,
    style,
    svg,
    swatch,
)

OPEN = 16  # panels shown at once; the others are folded
WIDTH, CHARACTER = 205, 6  # CSS pixels: least width of an x axis, and of a character
LEVELS = [0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999]  # ticks where levels are many


@dataclass(frozen=True)
class Sweep:
    """The x axis that all panels of a figure share."""

    name: str
    values: NDArray[np.float64]

    def place(self, values: ArrayLike) -> NDArray[np.float64]:
        """Return positions on the axis: -log2(1 - level) for levels, else log2(value)."""
        values = np.asarray(values, dtype=float)
        if self.name == "level":
            return np.asarray(-np.log2(np.maximum(1 - values, 1e-6)))
        return np.asarray(np.log2(values)) if self.values.min() > 0 else values

    def dress(self, axes: Axes) -> None:
        """Put ticks at what was measured, with labels where there is room for them."""
        ticks = self.values
        if self.name == "level" and len(ticks) > 8:
            ticks = np.array([v for v in LEVELS if ticks[0] <= v <= ticks[-1]])
        scale = 100 if self.name == "level" else 1
        places = self.place(self.values)
        margin = max(0.06 * np.ptp(places), 0.2)
        left, right = places.min() - margin, places.max() + margin
        labels = [f"{round(scale * v, 2):g}" for v in ticks]
        at = self.place(ticks)
        axes.set_xticks(at, apart((at - left) / (right - left) * WIDTH, labels))
        axes.set_xlabel("sparsity, %" if self.name == "level" else self.name)
        axes.set_xlim(left, right)


@dataclass(frozen=True)
class Quantity:
    """A column to draw, the columns of its interval, its name with the unit, the baseline's value.

    Markers are hollow where the column `hollow` is True.
    """

    column: str
    low: str
    high: str
    name: str
    baseline: float | None = None
    hollow: str = ""


def apart(middles: NDArray[np.float64], labels: Sequence[str]) -> list[str]:
    """Leave out labels that would touch the next one; `middles` are pixels from the left."""
    kept, free = list(labels), np.inf
    for i in reversed(range(len(kept))):
        half = CHARACTER * (len(labels[i]) + 1) / 2
        if middles[i] + half > free:
            kept[i] = ""
        else:
            free = middles[i] - half
    return kept


def sweep(cases: pd.DataFrame, x: str) -> Sweep:
    """Return the x axis for these cases."""
    return Sweep(x, np.unique(cases[x].dropna().to_numpy(dtype=float).round(4)))


def legend(names: Mapping[str, int], solid: str, empty: str = "") -> Markup:
    """Return a legend: each series, the meaning of the plain line, and that of hollow markers."""
    entries = [(swatch(number), name) for name, number in names.items()] + [(swatch(None), solid)]
    entries += [(hollow(), empty)] if empty else []
    items = Markup("").join(Markup("<li>{}{}</li>").format(*entry) for entry in entries)
    return Markup('<ul class="legend">{}</ul>').format(items)


def draw_panels(
    frames: Frames,
    groups: list[tuple[str, pd.DataFrame]],
    axis: Sweep,
    quantity: Quantity,
    dress: Callable[[Axes, pd.DataFrame], Markup],
) -> Markup:
    """Draw all panels with one y range; `dress` adds to a panel and returns its caption."""
    bounds = _bounds(pd.concat([group for _, group in groups]), quantity)
    drawn = []
    with style():
        for title, group in groups:
            figure, axes = canvas()
            axes.set_yscale("log", base=2)
            axes.set_ylim(*bounds)
            for label, number in frames.series.items():
                _line(axes, group[group.label == label], axis, quantity, number)
            _dress(axes, axis, quantity)
            caption = dress(axes, group)
            drawn.append((title, svg(figure, f"{quantity.name}, {title}"), caption))
    return side_by_side(drawn)


def side_by_side(drawn: Sequence[tuple[str, Markup, Markup]]) -> Markup:
    """Lay out panels (title, drawing, caption): the first OPEN of them, the others folded."""
    figure = Markup("<figure><h3>{}</h3>{}<figcaption>{}</figcaption></figure>")
    figures = [figure.format(*panel) for panel in drawn]
    shown = Markup('<div class="panels">{}</div>').format(Markup("").join(figures[:OPEN]))
    if len(figures) <= OPEN:
        return shown
    rest = Markup('<div class="panels">{}</div>').format(Markup("").join(figures[OPEN:]))
    return shown + folded(f"{len(figures) - OPEN} more panels", rest)


def _bounds(cases: pd.DataFrame, quantity: Quantity) -> tuple[float, float]:
    """Return limits that include the baseline and span at least two octaves: noise stays small."""
    logs = np.log2(cases[[quantity.low, quantity.high]].to_numpy(dtype=float))
    base = np.nan if quantity.baseline is None else np.log2(quantity.baseline)
    low, high = np.nanmin([np.nanmin(logs), base]), np.nanmax([np.nanmax(logs), base])
    margin = max(0.3, 1 - (high - low) / 2)
    return float(2 ** (low - margin)), float(2 ** (high + margin))


def _line(axes: Axes, cases: pd.DataFrame, axis: Sweep, quantity: Quantity, number: int) -> None:
    cases = cases.sort_values(axis.name)
    if cases.empty:
        return
    x, look = axis.place(cases[axis.name]), series(number)
    columns = quantity.column, quantity.low, quantity.high
    y, low, high = (cases[name].to_numpy(dtype=float) for name in columns)
    axes.plot(x, y, **look)
    if quantity.hollow:
        empty = cases[quantity.hollow].to_numpy(dtype=bool)
        axes.plot(x[empty], y[empty], **look | HOLLOW)
    axes.vlines(x, low, high, color=look["color"], linewidth=1.2, alpha=0.7)
    axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)


def _dress(axes: Axes, axis: Sweep, quantity: Quantity) -> None:
    axis.dress(axes)
    if quantity.baseline is not None:
        axes.axhline(quantity.baseline, color=INK, linewidth=1.2)
    axes.set_ylabel(quantity.name)
    axes.yaxis.set_major_locator(LogLocator(base=2, numticks=9))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.8)
    axes.tick_params(length=3)
