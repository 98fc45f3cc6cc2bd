"""The noise floor: the ratio of every A/A pair (one kernel twice in one contest), by length.

 │:  ├─●─┤  :          :  the floor of the class: one process cannot resolve a ratio inside it
 │:   ┼  ├◆─:─┤        ●  ratio of the pair with its 95 % interval over the processes
-1%   0   +1%          ◆  different: the interval excludes 1
"""

from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._chart import SIZE, named_rows
from sparsebench.reports.figures._html import NOTHING, beside, note
from sparsebench.reports.figures._svg import OURS, PEER, Look
from sparsebench.results.formatting import duration
from sparsebench.results.problem_names import measure_text
from sparsebench.results.tables.analysis import Analysis

TITLE = "Noise floor"
ORDER = 75

ROW, MOST = 10, 420  # CSS pixels of one pair, and the most for all pairs of a panel
READ = (
    "In a pair, a contest prepares and times one kernel twice. A point is the difference over "
    "all processes with its 95 % interval. The dotted lines are the noise floor of one process. "
    "If a run has few pairs, the floor is at least that of many pairs on an NVIDIA H200. Squares "
    "are the reference pairs of every run, circles are twins in the suite, and diamonds are pairs "
    "whose interval excludes 1."
)


def draw(analysis: Analysis) -> Markup:
    """Draw the pairs of each class below each other; all classes share an axis."""
    pairs, floors = analysis.noise.pairs, analysis.noise.floors
    if pairs.empty:
        return NOTHING
    ends = np.abs(pairs[["ratio", "low", "high"]].to_numpy(dtype=float) - 1)
    limit = 110 * max(float(np.nanmax(ends)), *floors.values())
    groups = pairs.sort_values("median_us").groupby("class", sort=False)
    panels = [_panel(str(name), group, floors[str(name)], limit) for name, group in groups]
    return note(READ) + beside(panels)


def _panel(name: str, pairs: pd.DataFrame, floor: float, limit: float) -> tuple[str, Markup, str]:
    row = min(ROW, MOST // len(pairs))
    chart = named_rows([""] * len(pairs), SIZE[0], row, "difference, %")
    chart.limits["x"] = -limit, limit
    chart.rule("x", 0, Look(width=0.8))
    for end in (-100 * floor, 100 * floor):
        chart.rule("x", end, Look(dash="1 2"))
    for y, (_, pair) in enumerate(pairs.sort_values("ratio").iterrows()):
        differs = not pd.isna(pair.different) and pair.different
        marker = "D" if differs else "s" if pair.reference else "o"
        look = Look(PEER if differs else OURS, marker, None)
        low, ratio, high = (100 * (float(pair[end]) - 1) for end in ("low", "ratio", "high"))
        chart.spans([y], [low], [high], look, across=True)
        chart.line([ratio], [y], look, [_title(pair)])
    verdicts = pairs.different.dropna()
    count = (
        f"{verdicts.sum()} of {len(verdicts)}" if len(verdicts) else "unknown, too few processes"
    )
    words = f"floor {100 * floor:.2g} %; different: {count}"
    return name, chart.svg(f"A/A pairs, {name}"), words


def _title(pair: "pd.Series[Any]") -> str:
    place = f"{pair.label}, {pair.problem}, {measure_text(pair)}"
    return f"{place}, {duration(pair.median_us)}: {100 * (pair.ratio - 1):+.2g} %"
