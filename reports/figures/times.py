"""Time of a call against the swept field."""

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._figure import FIELDS, Frames, each_measure, panels, swept
from sparsebench.reports.figures._html import download, fold_away, note
from sparsebench.reports.figures._svg import Look
from sparsebench.reports.figures._sweep import Quantity, draw_panels, left_out, legend, sweep
from sparsebench.reports.figures._verdict import spans

TITLE = "Time of a call"
ORDER = 40

OPEN = 8  # panels shown at once; if there are more, all are folded

TIME = Quantity("median_us", "low_us", "high_us", "time, µs", best="least")


def draw(frames: Frames) -> Markup:
    """Draw one panel per shape and block; the solid line is the baseline."""
    return each_measure(frames.raced, lambda cases: _draw(frames, cases))


def _draw(frames: Frames, raced: pd.DataFrame) -> Markup:
    axis = sweep(raced, swept(raced))
    same, groups = panels(raced, axis.name)
    groups = [panel for panel in groups if panel[1].label.isin(frames.series).any()] or groups

    def dress(chart: Chart, group: pd.DataFrame) -> None:
        for _, base in group[~group.label.isin(frames.series)].groupby("label", sort=False):
            line = base.sort_values(axis.name)
            x, y = axis.place(line[axis.name]), line.median_us.to_numpy(dtype=float)
            chart.line(x, y, Look(marker="o", size=2.5), name="dense")

    bases = " and ".join(raced.label[~raced.label.isin(frames.series)].unique())
    drawn = draw_panels(frames, groups, axis, TIME, dress)
    shown = drawn if len(groups) <= OPEN else fold_away(f"{len(groups)} panels", drawn)
    words = f"{same}. Points are medians. {spans(raced)}{left_out(groups, axis.name)}"
    key = legend(frames.series_of(raced), bases, drawn=raced.side)
    data = raced[[*FIELDS, "median_us", "low_us", "high_us"]]
    return note(words) + key + shown + download("times", data)
