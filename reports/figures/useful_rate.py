"""Rate per useful FLOP of attention, as a fraction of the dense baseline's, against the sparsity.

    100 % x speedup x (FLOPs of allowed elements / FLOPs of all elements)

100 % means that the time is proportional to the elements that the mask allows. The rest is lost to
short lists, partial blocks, and loads that dense attention shares over more queries.
"""

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import FIELDS, NOTHING, Frames, each_measure, panels
from sparsebench.reports.figures._html import download, note
from sparsebench.reports.figures._sweep import Quantity, draw_panels, left_out, legend, sweep

TITLE = "Fraction of the dense rate"
ORDER = 25

RATE = Quantity("rate", "rate_low", "rate_high", "dense rate per useful FLOP, %", 100, best="most")


def draw(frames: Frames) -> Markup:
    """Draw one panel per shape and block; NOTHING for other ops than attention."""
    raced = frames.raced
    if raced.empty:
        return NOTHING
    sparse = raced.op.str.startswith("attention") & raced.speedup.notna() & (raced.side != "dense")
    return each_measure(raced[sparse], lambda cases: _draw(frames, cases))


def _draw(frames: Frames, cases: pd.DataFrame) -> Markup:
    points = cases[cases.label.isin(frames.series) & cases.level.notna()]
    if points.empty:
        return NOTHING
    useful = 100 * points.tflops / points.dense_tflops
    points = points.assign(
        rate=useful * points.speedup,
        rate_low=useful * points.speedup_low,
        rate_high=useful * points.speedup_high,
    )
    axis = sweep(points, "level")
    same, groups = panels(points, "level")

    words = f"{same}. FLOPs per second of the elements that the mask allows, as a percentage of "
    words += f"those of the dense baseline.{left_out(groups, axis.name)}"
    return (
        note(words)
        + legend(frames.series_of(points), "dense baseline", drawn=points.side)
        + draw_panels(frames, groups, axis, RATE)
        + download("useful_rate", points[[*FIELDS, "rate", "rate_low", "rate_high"]])
    )
