"""Does a dense product of few tokens take longer than one of more? It is then not at its best.

    m tokens         16      64     256       a kernel for 64 tokens computes 16 as well: the time
    median, µs     69.3    66.0    70.1       for 16 tokens should be 66.0 or less

A cell is what is equal but for m: op, all other fields, kernel, options, device and cache. Its time
is the median of its processes, on the device. Differences within the noise mean nothing: MARGINS
are the largest differences of A/A pairs in one process, as seen on H200s.
"""

import pandas as pd

from sparsebench.results.frame import fields
from sparsebench.results.record import Status

MARGINS = {8.0: 0.042, 20.0: 0.062, 100.0: 0.036, float("inf"): 0.02}  # up to µs: relative
WHERE = ["device", "cache", "op", "kernel", "options"]


def slower_with_fewer(table: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each dense baseline's time that is beaten by that of more tokens.

    table    a frame (results/frame.py)
    columns  those of a cell, m and median_us, and of the fastest with more tokens `more_m` and
             `more_us`; ordered by how much slower fewer tokens are
    """
    right = table[(table.status == Status.OK) & (table.format == "dense") & table.baseline]
    right = right[right.scope == "kernel"]
    cell = [*WHERE, *(name for name in fields(table) if name != "m")]
    times = right.groupby([*cell, "m"], dropna=False).median_us.median().reset_index()
    pairs = times.merge(times, on=cell, suffixes=("", "_more"))
    pairs = pairs[pairs.m_more > pairs.m].sort_values("median_us_more")
    pairs = pairs.drop_duplicates([*cell, "m"])
    margin = pairs.median_us_more.map(_margin)
    slower = pairs[pairs.median_us > (1 + margin) * pairs.median_us_more]
    slower = slower.rename(columns={"m_more": "more_m", "median_us_more": "more_us"})
    order = (slower.median_us / slower.more_us).sort_values(ascending=False).index
    return slower.loc[order].reset_index(drop=True)


def _margin(time_us: float) -> float:
    """Return the margin of a call of this length."""
    return next(margin for below, margin in MARGINS.items() if time_us < below)
