"""A quantity against the swept field: the best of each side, a panel per shape, one axis for all.

log2 y │   ●──●──○ ours    upright: intervals; hollow: undecided; faint: every other contender
     1 ┼─────────── dense
       └─────────── x: sparsity on a log scale of density, or m ...
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from numpy.typing import ArrayLike, NDArray

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._figure import NOTHING, panels
from sparsebench.reports.figures._html import note, side_by_side
from sparsebench.reports.figures._svg import INK, ROLES, Look
from sparsebench.results.formatting import amount, between
from sparsebench.results.tables.frame import records

FLOOR = 0.25  # lower values, relative to the baseline's, are left to the table of every case
LEVELS = [0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999]  # ticks for many levels
POWERS = [2.0**power for power in range(21)]  # ticks for many numbers of tokens
MANY = 8  # up to so many values, each has a tick
FAINT = Look(INK, "o", width=0.8, size=2.4, alpha=0.3)
IDEAL = Look(dash="1 2", width=1, alpha=0.6)


@dataclass(frozen=True)
class Axis:
    """The x axis that all panels of a figure share: a field of the cases and its values."""

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
        ticks, is_level = self.values, self.name == "level"
        if len(ticks) > MANY:
            round_values = LEVELS if is_level else POWERS
            ticks = np.array([v for v in round_values if ticks[0] <= v <= ticks[-1]])
        places = self.place(self.values)
        margin = max(0.06 * np.ptp(places), 0.2)
        chart.limits["x"] = float(places.min() - margin), float(places.max() + margin)
        labels = [f"{round((100 if is_level else 1) * v, 2):g}" for v in ticks]
        chart.ticks["x"] = [*zip(map(float, self.place(ticks)), labels, strict=True)]
        chart.names["x"] = "sparsity, %" if is_level else self.name


@dataclass(frozen=True)
class Sweep:
    """What a figure of panels draws: a column of the cases, with its interval in two more.

    column    the values; their intervals are in COLUMN_low and COLUMN_high
    name      of the values, with the unit
    baseline  the value of the baseline
    ideal     the value at a sparsity for time proportional to the non-zeros, if it is drawn
    """

    column: str
    name: str
    baseline: float
    ideal: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None = None

    def draw(self, cases: pd.DataFrame, x: str, words: str) -> Markup:
        """Draw the panels with two points or more; `words` stand above them."""
        axis = Axis(x, np.unique(cases[x].dropna().to_numpy(dtype=float).round(4)))
        same, groups = panels(cases, x)
        wide = [each for each in groups if each[1][x].round(4).nunique() > 1]
        ends = cases[[self.column, f"{self.column}_low", f"{self.column}_high"]]
        least = max(np.nanmin(ends), FLOOR * self.baseline)
        limits = min(least, self.baseline) / 1.08, max(np.nanmax(ends), self.baseline) * 1.08
        drawn = [(title, self._panel(title, group, axis, limits)) for title, group in wide]
        text = f"{same}. {words} Faint: every other contender; select a point for its name."
        if single := len(groups) - len(wide):
            text += f" Not drawn: {amount(single, 'panel')} with a single point."
        return note(text) + side_by_side([(*each, NOTHING) for each in drawn])

    def _panel(
        self, title: str, cases: pd.DataFrame, axis: Axis, limits: tuple[float, float]
    ) -> Markup:
        chart = Chart(y=self.name, log="y")
        chart.limits["y"] = limits
        axis.dress(chart)
        chart.rule("y", self.baseline, name="dense")
        seen = cases[cases[self.column].between(*limits)]
        if self.ideal is not None and axis.name == "level":
            levels = np.linspace(axis.values[0], axis.values[-1], 50)
            ideal = self.ideal(levels)
            chart.line(axis.place(levels[ideal <= limits[1]]), ideal[ideal <= limits[1]], IDEAL)
        joined = bool(seen.source.isna().all())  # patterns from files are no sweep
        for _, line in seen.groupby("label", sort=False):
            self._line(chart, line, axis, FAINT if joined else FAINT.but(dash=None))
        for side in ("peer", "ours"):
            ranked = seen[seen.side == side].sort_values(self.column, ascending=False)
            at = ranked[axis.name].round(4) if joined else ranked.problem_id
            self._side(chart, ranked[~at.duplicated()], axis, side, joined)
        return chart.svg(f"{self.name}, {title}")

    def _side(self, chart: Chart, cases: pd.DataFrame, axis: Axis, side: str, joined: bool) -> None:
        """Draw the best cases of a side with their intervals; undecided ones are hollow."""
        look, x = ROLES[side], axis.place(cases[axis.name])
        low, high = (cases[f"{self.column}_{end}"] for end in ("low", "high"))
        chart.spans(x, low, high, look.but(width=1.4, alpha=0.7, dash=""))
        path = look.but(marker="") if joined else look.but(marker="", dash=None)
        self._line(chart, cases, axis, path, side)
        for hollow, group in cases.groupby("undecided"):
            self._line(chart, group, axis, look.but(dash=None, hollow=bool(hollow)))

    def _line(
        self, chart: Chart, cases: pd.DataFrame, axis: Axis, look: Look, name: str = ""
    ) -> None:
        cases = cases.sort_values(axis.name)
        titles = [self._title(line) for line in records(cases)] if look.marker else []
        chart.line(axis.place(cases[axis.name]), cases[self.column], look, titles, name)

    def _title(self, case: dict[Any, Any]) -> str:
        """Write a case for a tooltip: `bsr/bsr_small: 5.1 [5.0, 5.2] speedup, ×`."""
        value, low, high = (case[f"{self.column}{end}"] for end in ("", "_low", "_high"))
        return f"{case['label']}: {between(value, low, high, unit='')} {self.name}"
