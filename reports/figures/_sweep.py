"""Small multiples: a quantity against the swept field, a line per contender, a panel per shape.

log2 y │   ●──●──○      band: the interval, the range or the quartiles; hollow: undecided
     1 ┼──────────── baseline
       └─────────── x: sparsity on a log scale of density, or m ...
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from markupsafe import Markup
from numpy.typing import ArrayLike, NDArray

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._figure import NOTHING, Frames
from sparsebench.reports.figures._html import beside, fold_away
from sparsebench.reports.figures._svg import INK, ROLES, Look, contender_swatch, series, swatch
from sparsebench.results.formatting import amount, significant

NARROWEST = 1.3  # least ratio of the ends of the y axis
FAR = 2.0  # the y axis leaves out contenders that are slower by more than this factor
OPEN = 12  # panels shown at once; the others are folded
LEVELS = [0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999]  # ticks for many levels
POWERS = [2.0**power for power in range(21)]  # ticks for many numbers of tokens
MANY = 8  # up to so many values, each has a tick
HOLLOW = Look(INK, "o", None, size=5, hollow=True)


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

    def dress(self, chart: Chart) -> None:
        """Put ticks at the measured values, or at round ones if there are many."""
        ticks = self.values
        if len(ticks) > MANY:
            round_values = LEVELS if self.name == "level" else POWERS
            ticks = np.array([v for v in round_values if ticks[0] <= v <= ticks[-1]])
        scale = 100 if self.name == "level" else 1
        places = self.place(self.values)
        margin = max(0.06 * np.ptp(places), 0.2)
        chart.limits["x"] = float(places.min() - margin), float(places.max() + margin)
        labels = [f"{round(scale * v, 2):g}" for v in ticks]
        chart.ticks["x"] = [*zip(map(float, self.place(ticks)), labels, strict=True)]
        chart.names["x"] = "sparsity, %" if self.name == "level" else self.name


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


def sweep(cases: pd.DataFrame, x: str) -> Sweep:
    """Return the x axis for these cases."""
    return Sweep(x, np.unique(cases[x].dropna().to_numpy(dtype=float).round(4)))


def legend(
    names: Mapping[str, int], solid: str, empty: str = "", drawn: "pd.Series[str] | None" = None
) -> Markup:
    """Return a legend: every series, the solid line, and the meaning of hollow markers.

    With the sides that are `drawn`, it shows the best of each, and a checkbox for every contender.
    """
    entries = [(contender_swatch(None), solid)] + ([(swatch(HOLLOW), empty)] if empty else [])
    contenders = [(contender_swatch(number), name) for name, number in names.items()]
    item = Markup("<li>{}{}</li>")
    if drawn is None:
        items = Markup("").join(item.format(*entry) for entry in contenders + entries)
        return Markup('<ul class="legend">{}</ul>').format(items)
    sides = {"ours": "best of ours", "peer": "best sparse peer"}
    best = [(swatch(ROLES[side]), words) for side, words in sides.items() if (drawn == side).any()]
    entries = [*best, *entries]
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
    dress: Callable[[Chart, pd.DataFrame], Markup | None] = lambda chart, group: None,
) -> Markup:
    """Draw the panels with two points or more; `dress` adds to a panel and may return its caption.

    If the quantity has a `best`, draw the best of ours and the best sparse peer, and the other
    contenders on demand.
    """
    drawn = []
    for title, group in groups:
        if group[axis.name].round(4).nunique() < 2:
            continue
        group = group[[name for name in _columns(axis, quantity) if name in group]]
        chart = Chart(y=quantity.name, log="y")
        chart.limits["y"] = _bounds(group, quantity)
        axis.dress(chart)
        if quantity.baseline is not None:
            chart.rule("y", quantity.baseline, name="dense" if quantity.best else "")
        if quantity.best:
            _roles(chart, group, axis, quantity)
        for label, number in frames.series_of(group).items():
            line = group[group.label == label]
            _line(chart, line, axis, quantity, series(number), others=bool(quantity.best))
        caption = dress(chart, group) or NOTHING
        drawn.append((title, chart.svg(f"{quantity.name}, {title}"), caption))
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


def _columns(axis: Sweep, quantity: Quantity) -> list[str]:
    """Return the columns that a panel needs, since narrow tables are much faster to select from."""
    names = [axis.name, quantity.column, quantity.low, quantity.high, quantity.hollow, "label"]
    names += ["side", "source", "problem_id", "baseline_label", "median_us"]
    return [*dict.fromkeys(filter(None, names))]


def _roles(chart: Chart, cases: pd.DataFrame, axis: Sweep, quantity: Quantity) -> None:
    """Draw the best of ours and the best sparse peer at each x."""
    for side in ("peer", "ours"):
        ranked = cases[cases.side == side].sort_values(quantity.column, kind="stable")
        ranked = ranked[::-1] if quantity.best == "most" else ranked
        at = ranked[axis.name].round(4)
        best = ranked[~at.duplicated()] if ranked.source.isna().all() else ranked
        _line(chart, best, axis, quantity, ROLES[side], name=side)


def scatter(
    chart: Chart, cases: pd.DataFrame, columns: tuple[str, str], texts: "pd.Series[str]"
) -> None:
    """Draw a point per case in the look of its side, with its text as a tooltip."""
    for side in ("dense", "peer", "ours"):
        chosen = cases.side == side
        look = ROLES[side].but(dash=None, size=3.6, alpha=0.75)
        x, y = (cases[chosen][name] for name in columns)
        chart.line(x, y, look, [*texts[chosen]])


def side_by_side(drawn: Sequence[tuple[str, Markup, Markup]]) -> Markup:
    """Lay out panels (title, drawing, caption): show the first OPEN, and fold the others."""
    shown, left = beside(drawn[:OPEN]), len(drawn) - OPEN
    return shown if left <= 0 else shown + fold_away(f"{left} more panels", beside(drawn[OPEN:]))


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


def _span(low: float, high: float) -> str:
    return f" [{significant(low)}, {significant(high)}]" if high > low else ""


def _line(
    chart: Chart,
    cases: pd.DataFrame,
    axis: Sweep,
    quantity: Quantity,
    look: Look,
    name: str = "",
    others: bool = False,
) -> None:
    """Draw a line with its interval; `others` are shown on demand, without intervals."""
    seen = cases[quantity.column].between(*chart.limits["y"])  # the table lists far slower ones
    cases = cases[seen].sort_values(axis.name)
    if cases.empty:
        return
    x = axis.place(cases[axis.name])
    columns = quantity.column, quantity.low, quantity.high
    y, low, high = (cases[column].to_numpy(dtype=float) for column in columns)
    many = cases.source.notna().any()  # patterns from files are no sweep, so no line joins them
    look = look.but(dash=None) if many else look
    if not others:
        chart.spans(x, low, high, look.but(width=1.2, alpha=0.7))
        if not many:
            chart.band(x, low, high, look.color)
    scale = 100 if axis.name == "level" else 1
    titles = [
        f"{label}: {significant(value)}{_span(least, most)} {quantity.name}"
        f" at {round(scale * at, 2):g}{' %' if axis.name == 'level' else f' {axis.name}'}"
        for label, value, least, most, at in zip(
            cases.label, y, low, high, cases[axis.name].to_numpy(dtype=float), strict=True
        )
    ]
    chart.line(x, y, look, titles, name, "others" if others else "")
    if quantity.hollow and not others:
        empty = cases[quantity.hollow].to_numpy(dtype=bool)
        chart.line(x[empty], y[empty], look.but(dash=None, hollow=True))
