"""Speedup over the baseline against the swept field, with the break-even of each contender."""

from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._figure import (
    FIELDS,
    NOTHING,
    Frames,
    describe_line,
    each_measure,
    panels,
    swept,
)
from sparsebench.reports.figures._html import download, fold_away, note
from sparsebench.reports.figures._svg import Look
from sparsebench.reports.figures._sweep import Quantity, Sweep, draw_panels, left_out, legend, sweep
from sparsebench.reports.figures._verdict import intervals, meaning
from sparsebench.reports.tables import html_table
from sparsebench.results.formatting import amount, percent, significant
from sparsebench.results.tables.cases import break_even
from sparsebench.results.tables.frame import fields

TITLE = "Speedup against the baseline"
ORDER = 20

SPEEDUP = Quantity(
    "speedup", "speedup_low", "speedup_high", "speedup, ×", 1, hollow="undecided", best="most"
)
DATA = [*FIELDS, "baseline_label", "speedup", "speedup_low", "speedup_high", "outcome", "median_us"]


def draw(frames: Frames) -> Markup:
    """Draw one panel per shape and block; bands are the intervals of the speedups."""
    raced = frames.raced
    return each_measure(raced[raced.speedup.notna()], lambda cases: _draw(frames, cases))


def _draw(frames: Frames, raced: pd.DataFrame) -> Markup:
    drawn = raced[raced.label.isin(frames.series)]
    if drawn.empty:
        return NOTHING
    axis = sweep(drawn, swept(drawn))
    same, groups = panels(drawn, axis.name)

    def dress(chart: Chart, group: pd.DataFrame) -> Markup:
        if axis.name == "level":
            _ideal(chart, axis)
        return _baseline(group, raced)

    words = f"{same}. The horizontal line is the baseline.{left_out(groups, axis.name)}"
    if axis.name == "level":
        words += " The dotted line is 1 / (1 − sparsity): time proportional to the non-zeros."
    words += f" {intervals(drawn)}"
    hollow = f"hollow: {meaning(frames.raced)[1]}"
    return (
        note(words)
        + legend(frames.series_of(drawn), "baseline", hollow, drawn.side)
        + draw_panels(frames, groups, axis, SPEEDUP, dress)
        + _break_evens(drawn)
        + download("speedup", drawn[DATA])
    )


def _ideal(chart: Chart, axis: Sweep) -> None:
    levels = np.linspace(axis.values[0], axis.values[-1], 50)
    ideal = 1 / np.maximum(1 - levels, 1e-6)
    seen = (ideal >= chart.limits["y"][0]) & (ideal <= chart.limits["y"][1])
    chart.line(axis.place(levels[seen]), ideal[seen], Look(dash="1 2", width=1, alpha=0.6))


def _baseline(group: pd.DataFrame, raced: pd.DataFrame) -> Markup:
    """Write the time of the baseline, because a speedup over a slow one means little."""
    base = raced[raced.problem_id.isin(group.problem_id) & (raced.label == raced.baseline_label)]
    low, high = significant(base.median_us.min()), significant(base.median_us.max())
    span = low if low == high else f"{low}–{high}"
    return Markup("<p>{}: {} µs</p>").format(" or ".join(base.label.unique()), span)


def _break_evens(drawn: pd.DataFrame) -> Markup:
    """List the sparsity at which each contender overtakes the baseline."""
    swept_levels = drawn[drawn.groupby("label")["level"].transform("nunique") > 1]
    if swept_levels.empty:
        return NOTHING
    crossings = break_even(swept_levels)
    first = ("op", "m", "n", "k", "dtype", "pattern", "block")
    more = [n for n in fields(drawn) if n not in (*first, "sparsity")]
    names = [n for n in first if n in crossings]
    names += [n for n in more if crossings[n].nunique(dropna=False) > 1]
    lines = [
        [describe_line(line, names), line.label, _crossing(line)]
        for _, line in crossings.iterrows()
    ]
    title = f"Break-even of each contender ({amount(len(lines), 'line')})"
    return fold_away(title, html_table(["problem", "contender", "faster than the baseline"], lines))


def _crossing(line: "pd.Series[Any]") -> str:
    if pd.isna(line.faster):
        return f"at no measured level, up to {percent(line.slower)}"
    if pd.isna(line.slower):
        return f"from {percent(line.faster)} on, the lowest measured level"
    return f"above some point between {percent(line.slower)} and {percent(line.faster)}"
