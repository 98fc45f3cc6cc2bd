"""The noise floor: the ratio of every A/A pair (one kernel twice in one contest), by length.

 │▒▒▒|▒▒▒▒▒│          ▒  the floor of the class: one process cannot resolve a ratio inside it
 │  ├─●─┤  │          ●  ratio of the pair with its 95 % interval over the processes
 │▒▒|▒┼▒├◆─┼─┤        |  one process     ◆  different: the interval excludes 1
-1%   0   +1%
"""

from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._chart import SIZE, Chart
from sparsebench.reports.figures._figure import MEASURE, NOTHING, Frames, describe_line
from sparsebench.reports.figures._html import beside, fold_away, note
from sparsebench.reports.figures._svg import Look, series
from sparsebench.reports.tables import html_table, without_dashes
from sparsebench.results.formatting import significant

TITLE = "Noise floor"
ORDER = 75

HEADS = ["class", "pair", "problem", "measure", ">time, µs", ">difference, %", ">interval, %"]
HEADS += ["different"]
PAIR_PX, MOST_PX = 10, 420  # height of one pair, and the most for all pairs of a panel
READ = (
    "In a pair, a contest prepares and times one kernel twice. A point is the difference over "
    "all processes with its 95 % interval, and a tick is a single process. The shaded area is the "
    "noise floor of one process. If a run has few pairs, the floor is at least that of many pairs "
    "on an NVIDIA H200. Squares are the reference pairs of every run, circles are twins in the "
    "suite, and diamonds are pairs whose interval excludes 1."
)


def draw(frames: Frames) -> Markup:
    """Draw one forest plot per class, all with the same axis, and list the pairs."""
    pairs = frames.noise.pairs
    if pairs.empty:
        return NOTHING
    floors = frames.noise.floors
    most = max(*pairs.logs.explode().abs(), *floors.values(), *_width(pairs))
    figures = [
        _forest(str(name), group.sort_values("ratio"), floors[str(name)], 110 * most)
        for name, group in pairs.sort_values("median_us").groupby("class", sort=False)
    ]
    lines = [_line(pair) for _, pair in pairs.sort_values("median_us").iterrows()]
    listed = fold_away(f"All {len(lines)} pairs", html_table(*without_dashes(HEADS, lines)))
    return note(READ) + beside(figures) + listed


def _forest(name: str, pairs: pd.DataFrame, floor: float, limit: float) -> tuple[str, Markup, str]:
    height = 60 + min(PAIR_PX * len(pairs), MOST_PX)
    chart = Chart((SIZE[0], height), "difference, %")
    chart.limits, chart.ticks["y"] = {"x": (-limit, limit), "y": (-1, len(pairs))}, [(-1, "")]
    chart.area(-100 * floor, 100 * floor)
    chart.rule("x", 0, Look(width=0.8))
    for y, (_, pair) in enumerate(pairs.iterrows()):
        _pair(chart, y, pair)
    differences = pairs.different.dropna()
    called = (
        f"{differences.sum()} of {len(differences)}"
        if len(differences)
        else "unknown, too few processes"
    )
    words = f"floor {100 * floor:.2g} %; different: {called}"
    return name, chart.svg(f"A/A pairs, {name}"), words


def _pair(chart: Chart, y: int, pair: "pd.Series[Any]") -> None:
    called = not pd.isna(pair.different) and pair.different
    look = Look(series(int(called)).color, "D" if called else "s" if pair.reference else "o", None)
    ticks = [_percent(np.exp(log)) for log in pair.logs]
    chart.line(ticks, [y] * len(ticks), look.but(marker="|", alpha=0.45))
    chart.spans([y], [_percent(pair.low)], [_percent(pair.high)], look, across=True)
    chart.line([_percent(pair.ratio)], [y], look)


def _width(pairs: pd.DataFrame) -> list[float]:
    """Return the distance of each end of the intervals from 1."""
    ends = pairs[["low", "high"]].to_numpy(dtype=float)
    return [float(end) for end in np.abs(ends - 1).ravel() if not np.isnan(end)]


def _line(pair: "pd.Series[Any]") -> list[str | Markup]:
    ends = [significant(_percent(end), 2) for end in (pair.low, pair.high)]
    return [
        pair["class"],
        pair.label,
        pair.problem,
        describe_line(pair, MEASURE),
        significant(pair.median_us),
        significant(_percent(pair.ratio), 2),
        "–" if pd.isna(pair.low) else f"[{ends[0]} to {ends[1]}]",
        "–" if pd.isna(pair.different) else "yes" if pair.different else "no",
    ]


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)
