"""Speed-up over the baseline against the swept field, with the break-even of each contender."""

from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes

from sparsebench.reports.figures._figure import NOTHING, Frames, each_measure, named, panels, swept
from sparsebench.reports.figures._html import download, folded, note
from sparsebench.reports.figures._svg import INK
from sparsebench.reports.figures._sweep import Quantity, Sweep, draw_panels, left_out, legend, sweep
from sparsebench.reports.figures._verdict import meaning
from sparsebench.reports.tables import html_table
from sparsebench.results.analysis import NoCrossing, break_even
from sparsebench.results.formatting import amount, percent, significant

TITLE = "Speed-up against the baseline"
ORDER = 20

SPEEDUP = Quantity(
    "speedup", "speedup_low", "speedup_high", "speed-up, ×", 1, hollow="undecided", best="most"
)
DATA = ["op", "m", "n", "k", "dtype", "pattern", "block", "level", "scope", "cache", "label"]
DATA += ["baseline_label", "speedup", "speedup_low", "speedup_high", "outcome", "median_us"]


def draw(frames: Frames) -> Markup:
    """Draw one panel per shape and block; bands are the intervals of the speed-ups."""
    raced = frames.raced
    return each_measure(raced[raced.speedup.notna()], lambda cases: _draw(frames, cases))


def _draw(frames: Frames, raced: pd.DataFrame) -> Markup:
    drawn = raced[raced.label.isin(frames.series)]
    if drawn.empty:
        return NOTHING
    axis = sweep(drawn, swept(drawn))
    same, groups = panels(drawn, axis.name)

    def dress(axes: Axes, group: pd.DataFrame) -> Markup:
        if axis.name != "level":
            return _baseline(group, raced)
        _ideal(axes, axis)
        return _baseline(group, raced)

    words = f"{same}. Horizontal line: the baseline.{left_out(groups, axis.name)}"
    if axis.name == "level":
        words += " Dotted: 1 / (1 − sparsity), if the time follows the non-zeros."
    return (
        note(words)
        + legend(frames.series_of(drawn), "baseline", f"hollow: {meaning(frames.raced)[1]}", True)
        + draw_panels(frames, groups, axis, SPEEDUP, dress)
        + _break_evens(drawn)
        + download("speedup", drawn[DATA])
    )


def _ideal(axes: Axes, axis: Sweep) -> None:
    levels = np.linspace(axis.values[0], axis.values[-1], 50)
    ideal = 1 / np.maximum(1 - levels, 1e-6)
    axes.plot(axis.place(levels), ideal, ":", color=INK, alpha=0.6, linewidth=1)


def _baseline(group: pd.DataFrame, raced: pd.DataFrame) -> Markup:
    """Write the time of the baseline: a speed-up over a slow baseline says little."""
    base = raced[raced.problem_id.isin(group.problem_id) & (raced.label == raced.baseline_label)]
    low, high = significant(base.median_us.min()), significant(base.median_us.max())
    span = low if low == high else f"{low}–{high}"
    return Markup("<p>{}: {} µs</p>").format(" or ".join(base.label.unique()), span)


def _break_evens(drawn: pd.DataFrame) -> Markup:
    """List the sparsity from which on each contender is faster than the baseline."""
    found = break_even(drawn)
    found = found[found.last_level > found.first_level]
    if found.empty:
        return NOTHING
    names = [n for n in ("op", "m", "n", "k", "dtype", "pattern", "block") if n in found]
    found = found.merge(_measured(found, drawn), left_index=True, right_index=True)
    lines = [[named(line, names), line.label, _word(line)] for _, line in found.iterrows()]
    title = f"Break-even of each contender ({amount(len(lines), 'line')})"
    return folded(title, html_table(["problem", "contender", "faster"], lines))


def _measured(found: pd.DataFrame, drawn: pd.DataFrame) -> pd.DataFrame:
    """Return the measured levels on both sides of each break-even: `slower` and `faster`."""
    keys = list(found.columns[: list(found.columns).index("break_even")])
    groups = drawn.groupby(keys, dropna=False)["level"]
    levels = {tuple(map(_key, key)): own.round(6) for key, own in groups}
    ends = []
    for line in found.to_dict("records"):
        own = levels[tuple(_key(line[key]) for key in keys)]
        below = own < line["break_even"]
        ends.append((own[below].max(), own[~below].min()))
    return pd.DataFrame(ends, found.index, ["slower", "faster"])


def _key(value: Any) -> str:
    """Write a value of any column alike: a missing value has no equal, and 8 may be 8.0."""
    if isinstance(value, str):
        return value
    return "" if pd.isna(value) else f"{value:.12g}"


def _word(line: "pd.Series[Any]") -> str:
    if line.note == NoCrossing.ABOVE:
        return f"not up to {percent(line.last_level)}"
    if line.note:
        return f"already at {percent(line.first_level)}"
    return f"from a point between {percent(line.slower)} and {percent(line.faster)}"
