"""Stored bytes of each format, indices included, against the sparsity."""

import numpy as np
import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._figure import NOTHING, Frames, panels
from sparsebench.reports.figures._html import note
from sparsebench.reports.figures._svg import Look
from sparsebench.reports.figures._sweep import Quantity, draw_panels, legend, sweep
from sparsebench.results.tables.families import OF_ACTIVATIONS, OF_MASKS

TITLE = "Stored bytes"
ORDER = 50

BYTES = Quantity("percent", "percent", "percent", "bytes, % of dense", baseline=100)


def draw(frames: Frames) -> Markup:
    """Draw one panel per block and shape of weights; kernels of one format share a line.

    Return NOTHING if all weights are dense.
    """
    stored = frames.cases[frames.cases.bytes_of_dense.notna() & frames.cases.level.notna()]
    stored = stored[
        stored.label.isin(frames.series) & ~stored.format.isin(OF_ACTIVATIONS | OF_MASKS)
    ]
    stored = stored.drop_duplicates(["n", "k", "dtype", "pattern", "block", "level", "format"])
    if not (stored.format != "dense").any():
        return NOTHING
    stored = stored.assign(percent=100 * stored.bytes_of_dense)
    axis = sweep(stored, "level")
    same, groups = panels(stored, "level", together=["m", "scope", "cache"])

    def dress(chart: Chart, group: pd.DataFrame) -> None:
        levels = np.linspace(axis.values[0], axis.values[-1], 50)
        dotted = Look(dash="1 2", width=1, alpha=0.6)
        chart.line(axis.place(levels), 100 * (1 - levels), dotted)

    words = f"{same}. Bytes of values and indices as a percentage of the dense matrix. "
    words += "The dotted line is 1 − sparsity."
    first = stored.drop_duplicates("format")
    numbers = first.label.map(frames.series)
    names = dict(zip(first["format"].astype(str), numbers, strict=True))
    return note(words) + legend(names, "dense") + draw_panels(frames, groups, axis, BYTES, dress)
