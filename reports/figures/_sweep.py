"""Small multiples: a quantity against the swept field, a line per contender, a panel per shape.

log2 y │   ●──●──○      band: the interval, the range or the quartiles; hollow: undecided
     1 ┼──────────── baseline
       └─────────── x: sparsity on a log scale of density, or m ...
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import ArrayLike, NDArray

from sparsebench.reports.figures._figure import Frames
from sparsebench.reports.figures._html import folded
from sparsebench.reports.figures._svg import (
    HOLLOW,
    INK,
    ROLES,
    canvas,
    hollow,
    role,
    series,
    style,
    svg,
    swatch,
)
from sparsebench.results.formatting import amount, significant

NARROWEST = 1.3  # least ratio of the ends of the y axis
FAR = 2.0  # the y axis leaves out contenders that are slower by more than this factor
OPEN = 12  # panels shown at once; the others are folded
WIDTH, CHARACTER = 205, 6  # CSS pixels of the narrowest x axis and of a character
LEVELS = [
    0,
    0.5,
    0.75,
    0.9,
    0.95,
    0.98,
    0.99,
    0.995,
    0.998,
    0.999,
]  # ticks for many levels


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
        """Put ticks at the measured values, with labels if there is room for them."""
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

    hollow  a column of booleans: the markers of these cases are hollow
    best    `most` or `least` draws the best contender at each x; "" draws every contender
    """

    column: str
    low: str
    high: str
    name: str
    baseline: float | None = None
    hollow: str = ""
    best: str = ""


def apart(middles: NDArray[np.float64], labels: Sequence[str]) -> list[str]:
    """Blank the labels that would touch the next one; `middles` are pixels from the left."""
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


def legend(names: Mapping[str, int], solid: str, empty: str = "", roles: bool = False) -> Markup:
    """Return a legend: every series, the solid line, and the meaning of hollow markers.

    With `roles`, a checkbox shows every contender.
    """
    entries = [(swatch(None), solid)] + ([(hollow(), empty)] if empty else [])
    contenders = [(swatch(number), name) for name, number in names.items()]
    item = Markup("<li>{}{}</li>")
    if not roles:
        items = Markup("").join(item.format(*entry) for entry in contenders + entries)
        return Markup('<ul class="legend">{}</ul>').format(items)
    entries = [(role("ours"), "best of ours"), (role("peer"), "best sparse peer"), *entries]
    first = Markup("").join(item.format(*entry) for entry in entries)
    other = Markup('<li class="others">{}{}</li>')
    every = Markup("").join(other.format(*entry) for entry in contenders)
    box = '<li><label><input type="checkbox" data-every> every contender near them</label></li>'
    return Markup('<ul class="legend">{}{}{}</ul>').format(first, Markup(box), every)


def draw_panels(
    frames: Frames,
    groups: list[tuple[str, pd.DataFrame]],
    axis: Sweep,
    quantity: Quantity,
    dress: Callable[[Axes, pd.DataFrame], Markup],
) -> Markup:
    """Draw the panels with two points or more; `dress` adds to a panel and returns its caption.

    If the quantity has a `best`, draw the best of ours and the best sparse peer, and the other
    contenders on demand.
    """
    drawn = []
    with style():
        for title, group in groups:
            if group[axis.name].round(4).nunique() < 2:
                continue
            figure, axes = canvas()
            axes.set_yscale("log")
            axes.set_ylim(*_bounds(group, quantity))
            titles = _roles(axes, group, axis, quantity) if quantity.best else {}
            for label, number in frames.series_of(group).items():
                gid = f"of {'others' if quantity.best else 'line'}-{len(titles)}"
                line = group[group.label == label]
                titles[gid] = _line(axes, line, axis, quantity, series(number), gid)
            _dress(axes, axis, quantity)
            caption = dress(axes, group)
            drawn.append((title, svg(figure, f"{quantity.name}, {title}", titles), caption))
    return side_by_side(drawn)


def left_out(groups: list[tuple[str, pd.DataFrame]], x: str) -> str:
    """Return a sentence that counts the panels with a single point; "" if there are none."""
    count = sum(group[x].round(4).nunique() < 2 for _, group in groups)
    where = "the table of every case lists these points"
    noun = amount(count, "panel")
    return (
        f" {noun} with a single point {'are' if count > 1 else 'is'} not drawn; {where}."
        if count
        else ""
    )


def _roles(
    axes: Axes, cases: pd.DataFrame, axis: Sweep, quantity: Quantity
) -> dict[str, list[str]]:
    """Draw the best of ours and the best sparse peer at each x."""
    titles = {}
    for side in ("peer", "ours"):
        ranked = cases[cases.side == side].sort_values(quantity.column, kind="stable")
        ranked = ranked[::-1] if quantity.best == "most" else ranked
        at = ranked[axis.name].round(4)
        best = ranked[~at.duplicated()] if ranked.source.isna().all() else ranked
        look = {"markersize": 4.6, "linewidth": 1.6, "markeredgewidth": 0, **ROLES[side]}
        titles[f"of {side}"] = _line(axes, best, axis, quantity, look, f"of {side}")
    return titles


def scatter(
    axes: Axes, cases: pd.DataFrame, columns: tuple[str, str], texts: "pd.Series[str]"
) -> dict[str, list[str]]:
    """Draw a point per case in the look of its side, and return the tooltips by gid."""
    titles = {}
    for side in ("dense", "peer", "ours"):
        chosen = cases.side == side
        look = {**ROLES[side], "linestyle": "none", "markersize": 3.6, "markeredgewidth": 0}
        x, y = (cases[chosen][name] for name in columns)
        axes.plot(x, y, gid=f"of {side}", alpha=0.75, **look)
        titles[f"of {side}"] = [*texts[chosen]]
    return titles


def side_by_side(drawn: Sequence[tuple[str, Markup, Markup]]) -> Markup:
    """Lay out panels (title, drawing, caption): show the first OPEN, and fold the others."""
    figure = Markup("<figure><h3>{}</h3>{}<figcaption>{}</figcaption></figure>")
    figures = [figure.format(*panel) for panel in drawn]
    shown = Markup('<div class="panels">{}</div>').format(Markup("").join(figures[:OPEN]))
    if len(figures) <= OPEN:
        return shown
    rest = Markup('<div class="panels">{}</div>').format(Markup("").join(figures[OPEN:]))
    return shown + folded(f"{len(figures) - OPEN} more panels", rest)


def _bounds(cases: pd.DataFrame, quantity: Quantity) -> tuple[float, float]:
    """Return limits around the data and the baseline; they span at least NARROWEST."""
    logs = np.log(cases[[quantity.low, quantity.high, quantity.column]].to_numpy(dtype=float))
    if quantity.best:
        logs = logs[_near(cases, quantity)]
    base = np.nan if quantity.baseline is None else np.log(quantity.baseline)
    low, high = np.nanmin([np.nanmin(logs), base]), np.nanmax([np.nanmax(logs), base])
    margin = max(0.06 * (high - low), (np.log(NARROWEST) - (high - low)) / 2)
    return float(np.exp(low - margin)), float(np.exp(high + margin))


def _near(cases: pd.DataFrame, quantity: Quantity) -> NDArray[np.bool_]:
    """Return which cases are within FAR of the best one of their problem and side."""
    value = cases[quantity.column]
    best = value.groupby([cases.problem_id, cases.side]).transform(
        "max" if quantity.best == "most" else "min"
    )
    base = cases.label == cases.baseline_label
    return np.asarray((np.maximum(value / best, best / value) <= FAR) | base, dtype=bool)


def _line(
    axes: Axes, cases: pd.DataFrame, axis: Sweep, quantity: Quantity, look: Any, gid: str
) -> list[str]:
    """Draw a line with its interval, and return the tooltips of its markers."""
    seen = cases[quantity.column].between(*axes.get_ylim())  # the table lists far slower ones
    cases = cases[seen].sort_values(axis.name)
    if cases.empty:
        return []
    x = axis.place(cases[axis.name])
    columns = quantity.column, quantity.low, quantity.high
    y, low, high = (cases[name].to_numpy(dtype=float) for name in columns)
    many = cases.source.notna().any()  # patterns from files are no sweep, so no line joins them
    axes.plot(x, y, gid=gid, **look | ({"linestyle": "none"} if many else {}))
    if quantity.hollow and not gid.startswith("of others"):
        empty = cases[quantity.hollow].to_numpy(dtype=bool)
        axes.plot(x[empty], y[empty], **look | HOLLOW)
    if not gid.startswith("of others"):
        axes.vlines(x, low, high, color=look["color"], linewidth=1.2, alpha=0.7)
        if not many:
            axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    scale = 100 if axis.name == "level" else 1
    return [
        f"{label}: {significant(value)} [{significant(least)}, {significant(most)}] {quantity.name}"
        f" at {round(scale * at, 2):g}{' %' if axis.name == 'level' else f' {axis.name}'}"
        for label, value, least, most, at in zip(
            cases.label, y, low, high, cases[axis.name].to_numpy(dtype=float), strict=True
        )
    ]


def _dress(axes: Axes, axis: Sweep, quantity: Quantity) -> None:
    axis.dress(axes)
    if quantity.baseline is not None:
        axes.axhline(quantity.baseline, color=INK, linewidth=1.2)
    axes.set_ylabel(quantity.name)
    log_ticks(axes)


def log_ticks(axes: Axes) -> None:
    """Make y logarithmic with four to nine ticks: 1, 1.1, 1.2 or 1, 10, 100."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(FixedLocator(round_values(low, high)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.8)
    axes.tick_params(length=3)
    axes.set_ylim(low, high)


def log_scale(axes: Axes, low: float, high: float) -> None:
    """Make both axes logarithmic with round ticks; x spans two values."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    log_ticks(axes)
    ticks = round_values(low, high)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def round_values(low: float, high: float) -> list[float]:
    """Return four to nine round values between two positive ones."""
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
        values = [float(f"{step * 10.0**power:.3g}") for power in powers for step in steps]
        inside = [value for value in values if low <= value <= high]
        if len(inside) >= 4:
            return inside[:: -(-len(inside) // 9)]
    return [float(f"{value:.6g}") for value in MaxNLocator(6).tick_values(low, high)
            if low <= value <= high]  # fmt: skip
