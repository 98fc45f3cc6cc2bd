"""Error against speedup for several dense fractions of the weights, with the Pareto front.

    error │            0 o     a point: one dense fraction (its number), pruned by one method
          │     50 o   ┌─o     x: speedup in this run, with its interval
          │    ┌───o───┘       y: error after pruning to that fraction (results/model_files.py)
        0 ┼100 o────────       step: the front, the least error at that speedup or more
               1    speedup

Timed weights are random, so their error has no meaning. The errors come from `sparsebench prune`;
without them the figure is not drawn.
"""

from collections.abc import Iterable

import numpy as np
import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._figure import NOTHING, Frames, panels
from sparsebench.reports.figures._html import note, side_by_side
from sparsebench.reports.figures._svg import INK, OURS, PEER, Look
from sparsebench.reports.figures._verdict import intervals, meaning
from sparsebench.results.formatting import percent
from sparsebench.results.model_files import OUTPUT, Pruning

TITLE = "Error against speedup"
ORDER = 25

NEAR = 0.01  # tolerance of dense fractions: timed and pruned ones are rounded to tiles
SIZE = (320, 230)  # CSS pixels of a panel
LOOKS = [Look(OURS, "o"), Look(PEER, "^"), Look(INK, "s"), Look(INK, "D")]  # of methods, in order


def draw(frames: Frames) -> Markup:
    """Draw one panel per contender, shape, m and dtype, if there are errors to draw."""
    if frames.pruning is None:
        return NOTHING
    cases = _cases(frames.first)
    fractions = {*cases.dense}
    if len(fractions) < 2:
        return note(f"Errors need several dense fractions; this run has {_fractions(fractions)}.")
    points = _points(cases, frames.pruning)
    words = [_words(frames.pruning), f"Hollow: {meaning(cases)[1]}.", intervals(points)]
    if missing := fractions - {*points.dense}:
        words.append(f"Unknown, and not drawn: errors at {_fractions(missing)} dense.")
    return note(" ".join(words)) + side_by_side(_panels(points))


def front(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points that no other point beats in both speedup and error, slowest first.

    The dense baseline (speedup 1, error 0) is one of them unless a faster point has error 0.
    """
    baseline = pd.DataFrame({"speedup": [1.0], "error": [0.0]})
    candidates = pd.concat([points[["speedup", "error"]], baseline])
    candidates = candidates.sort_values(["speedup", "error"], ascending=[False, True])
    return candidates[candidates.error < candidates.error.cummin().shift(fill_value=np.inf)][::-1]


def _cases(cases: pd.DataFrame) -> pd.DataFrame:
    """Keep cases with a speedup and a dense fraction; `contender` is without its parameters."""
    dense = cases.params.str.extract(r"(?:^| )dense_fraction=(\S+)")[0].astype(float)
    cases = cases.assign(dense=dense, contender=cases.format + "/" + cases.kernel)
    return cases[cases.dense.notna() & cases.speedup.notna()]


def _points(cases: pd.DataFrame, pruning: Pruning) -> pd.DataFrame:
    """Return a line per case and recipe that prunes to the same dense fraction.

    `error` is in percent of the output, `method` names the recipe.
    """
    recipes = [each for each in pruning.outcomes if each.pattern != "unstructured"]
    points = [
        cases[(cases.dense - recipe.dense).abs() <= NEAR].assign(
            method=f"{recipe.method}, {recipe.region}", error=100 * recipe.errors[OUTPUT]
        )
        for recipe in recipes
    ]
    return pd.concat([cases[:0], *points], ignore_index=True)


def _panels(points: pd.DataFrame) -> list[tuple[str, Markup, str]]:
    """Draw the panels, all with the same axes."""
    low, high = float(points.speedup_low.min()), float(points.speedup_high.max())
    limits = {
        "x": (min(low, 1) - 0.15, max(high, 1) + 0.15),
        "y": (0, 1.15 * points.error.max() + 1),
    }
    looks = dict(zip(points.method.unique(), LOOKS * len(points), strict=False))
    drawn = []
    for contender, cases in points.groupby("contender", sort=False):
        same, groups = panels(cases, "level")
        over = f"{contender} over {' or '.join(cases.baseline_label.unique())}"
        for title, group in groups:
            chart = Chart(SIZE, "speedup, ×", "error of the output, %")
            chart.limits = limits
            _draw(chart, group, looks)
            drawn.append((title or same, chart.svg(f"{TITLE}, {title}"), over))
    return drawn


def _draw(chart: Chart, points: pd.DataFrame, looks: dict[str, Look]) -> None:
    """Draw the front as steps, and the points of each method with their fractions."""
    chart.rule("x", 1)
    best = front(points)
    chart.line(best.speedup.repeat(2)[:-1], best.error.repeat(2)[1:], Look(width=1))
    for method, line in points.groupby("method", sort=False):
        look, line = looks[str(method)], line.sort_values("dense")
        interval = look.but(width=1.2, alpha=0.7)
        chart.spans(line.error, line.speedup_low, line.speedup_high, interval, across=True)
        chart.line(line.speedup, line.error, look, name=str(method))
        unsure = line[line.undecided]
        chart.line(unsure.speedup, unsure.error, look.but(dash=None, hollow=True))
    for _, top in points.sort_values("error").groupby("dense").tail(1).iterrows():
        chart.text(top.speedup, top.error, f"{100 * top.dense:g}")


def _words(pruning: Pruning) -> str:
    """Describe the axes and the source of the errors."""
    tokens = f"{pruning.held_out:,} tokens held out of {pruning.tokens_from}"
    return (
        "x: speedups of this run with their intervals. y: relative error of the output, averaged "
        f"over layers, after {pruning.weights} (SHA-256 {pruning.sha256}) was pruned with "
        f"{pruning.calibration:,} tokens and measured on {tokens}. The timed weights are different "
        "ones. Numbers are the percentage of features left dense. The step is the Pareto front of "
        "the points and the dense baseline, which is the vertical line; it ignores the intervals."
    )


def _fractions(values: Iterable[float]) -> str:
    return ", ".join(map(percent, sorted(values))) or "none"
