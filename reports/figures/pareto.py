"""Error against speedup for several dense fractions of the weights, with the Pareto front.

    error │            0 o     a point: one dense fraction (its number), pruned by one method
          │     50 o   ┌─o     x: speedup in this run, with its interval
          │    ┌───o───┘       y: error after pruning to that fraction (results/model_files.py)
        0 ┼100 o────────       step: the front, the least error at that speedup or more
               1    speedup

A panel also shows cases with zeros anywhere (`50 %` beside the point) if the errors of unstructured
pruning to that sparsity are known.

Timed weights are random, so their error has no meaning. The errors come from `sparsebench prune`;
without them the figure is not drawn.
"""

import numpy as np
import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._figure import NOTHING, Frames, each_measure, panels
from sparsebench.reports.figures._html import fold_away, note
from sparsebench.reports.figures._svg import Look, series
from sparsebench.reports.figures._sweep import legend, side_by_side
from sparsebench.reports.figures._verdict import intervals, meaning
from sparsebench.reports.tables import html_table
from sparsebench.results.formatting import percent
from sparsebench.results.model_files import OUTPUT, Pruning
from sparsebench.results.tables.families import OF_ACTIVATIONS

TITLE = "Error against speedup"
ORDER = 25

ANYWHERE = "unstructured"  # a pattern of problems and of pruning
NEAR = 0.01  # tolerance of dense fractions: timed and pruned ones are rounded to tiles
NARROWEST, LOWEST = 0.4, 1  # least spans of the axes, in × and %
PRUNE = "sparsebench prune MODEL.gguf --dense {} --json > errors.json"
REPORT = "sparsebench report {} --errors errors.json"


def draw(frames: Frames) -> Markup:
    """Draw one panel per shape, m and dtype, or name the missing errors."""
    cases = _cases(frames.raced)
    fractions = sorted(cases.dense[~cases.anywhere].unique())
    if frames.pruning is None:
        return _missing_errors(frames, fractions) if len(fractions) > 1 else NOTHING
    if len(fractions) < 2:
        shown = ", ".join(map(percent, fractions)) or "none"
        return note(f"Errors need contenders with several dense fractions; this run has {shown}.")
    points = _points(cases, frames.pruning)
    if points.empty:
        return note(f"{frames.pruning.weights} has no error {_at(fractions)}.")
    numbers = {name: number for number, name in enumerate(points.method.unique())}
    drawn = set(points.dense[~points.anywhere])
    missing = [fraction for fraction in fractions if fraction not in drawn]
    unknown = f" Errors {_at(missing)} are unknown and not drawn." if missing else ""
    plain = "Pareto front; the vertical line is the baseline"
    empty = f"hollow: {meaning(frames.raced)[1]}"
    return (
        note(f"{_words(frames.pruning)} {intervals(points)}{unknown}")
        + legend(numbers, plain, empty)
        + each_measure(points, lambda measured: _draw(measured, numbers))
        + fold_away("The errors", _table(frames.pruning))
    )


def front(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points that no other point beats in both speedup and error, slowest first.

    The dense baseline (speedup 1, error 0) is one of them unless a faster point has error 0.
    """
    baseline = pd.DataFrame({"speedup": [1.0], "error": [0.0]})
    candidates = pd.concat([points[["speedup", "error"]], baseline])
    candidates = candidates.sort_values(["speedup", "error"], ascending=[False, True])
    return candidates[candidates.error < candidates.error.cummin().shift(fill_value=np.inf)][::-1]


def _cases(raced: pd.DataFrame) -> pd.DataFrame:
    """Keep cases with a speedup and a dense fraction, or with zeros `anywhere` (fraction 0).

    `contender` is the label without the parameters of the format.
    """
    dense = raced.params.str.extract(r"(?:^| )dense_fraction=(\S+)")[0].astype(float)
    labels = zip(raced.label, raced.params, strict=True)
    names = [label.removesuffix(f" {params}") for label, params in labels]
    zeros = raced["pattern"] == ANYWHERE if "pattern" in raced else False
    anywhere = zeros & ~raced.baseline.astype(bool) & ~raced.format.isin({"dense", *OF_ACTIVATIONS})
    cases = raced.assign(dense=dense.mask(anywhere, 0.0), anywhere=anywhere, contender=names)
    return cases[cases.dense.notna() & cases.speedup.notna()]


def _points(cases: pd.DataFrame, pruning: Pruning) -> pd.DataFrame:
    """Return a line per case and recipe that prunes to the same dense fraction or sparsity."""
    points = []
    for outcome in pruning.outcomes:
        anywhere = outcome.pattern == ANYWHERE
        alike = cases[cases.anywhere == anywhere]
        away = alike.level - outcome.sparsity if anywhere else alike.dense - outcome.dense
        how = f"{outcome.method}, {ANYWHERE if anywhere else outcome.region}"
        near = alike[away.abs() <= NEAR]
        points.append(near.assign(method=how, error=outcome.errors[OUTPUT]))
    return pd.concat(points, ignore_index=True)


def _draw(points: pd.DataFrame, numbers: dict[str, int]) -> Markup:
    low, high = min(points.speedup_low.min(), 1), max(points.speedup_high.max(), 1)
    margin = max(0.12 * (high - low), (NARROWEST - (high - low)) / 2)
    most = max(100 * points.error.max(), LOWEST)

    def panel(title: str, group: pd.DataFrame) -> tuple[str, Markup, Markup]:
        chart = Chart(x="speedup, ×", y="error of the output, %")
        ends = low - margin, high + margin
        chart.limits = {"x": ends, "y": (-0.05 * most, 1.15 * most)}
        chart.rule("x", 1)
        steps(chart, front(group).assign(error=lambda table: 100 * table.error))
        for method, line in group.groupby("method", sort=False):
            _line(chart, line.sort_values(["dense", "level"]), numbers[str(method)])
        _name(chart, group)
        return title, chart.svg(f"{TITLE}, {title}"), NOTHING

    parts = []
    beside = points[points.anywhere]
    for contender, alone in points[~points.anywhere].groupby("contender", sort=False):
        shown = pd.concat([alone, beside])
        same, groups = panels(shown, "level", ["pattern"] * (not beside.empty))
        contender = " and ".join([str(contender), *beside.contender.unique()])
        baselines = " or ".join(shown.baseline_label.unique())
        drawn = [panel(*group) for group in groups]
        parts.append(note(f"{contender} over {baselines}: {same}.") + side_by_side(drawn))
    return Markup("").join(parts)


def steps(chart: Chart, points: pd.DataFrame) -> None:
    """Draw the front as steps: up to each speedup, the error of the next point holds."""
    x = np.repeat(points.speedup.to_numpy(dtype=float), 2)[:-1]
    y = np.repeat(points.error.to_numpy(dtype=float), 2)[1:]
    chart.line(x, y, Look(width=1))


def _line(chart: Chart, points: pd.DataFrame, number: int) -> None:
    look = series(number)
    x, y = points.speedup.to_numpy(), 100 * points.error.to_numpy()
    interval = look.but(width=1.2, alpha=0.7)
    chart.spans(y, points.speedup_low, points.speedup_high, interval, across=True)
    chart.line(x, y, look)
    empty = points.undecided.to_numpy(dtype=bool)
    chart.line(x[empty], y[empty], look.but(dash=None, hollow=True))


def _name(chart: Chart, points: pd.DataFrame) -> None:
    """Write the dense fraction, or the sparsity of zeros anywhere, left of its highest point."""
    keys = points.level.where(points.anywhere, points.dense)
    tops = points.sort_values("error").groupby([points.anywhere, keys]).tail(1)
    for _, top in tops.iterrows():
        name = percent(top.level) if top.anywhere else f"{100 * top.dense:g}"
        chart.text(top.speedup, 100 * top.error, name)


def _words(pruning: Pruning) -> str:
    """Describe the axes and the source of the errors."""
    tokens = f"{pruning.held_out:,} tokens held out of {pruning.tokens_from}"
    return (
        "x: speedups of this run with their intervals. y: relative error of the output, averaged "
        f"over layers, after {pruning.weights} was pruned with {pruning.calibration:,} tokens and "
        f"measured on {tokens}. The timed weights are different ones. Numbers are the percentage "
        "of features left dense; with a % sign, the sparsity of zeros anywhere. The step is the "
        "Pareto front of the points and the dense baseline and ignores the intervals."
    )


def _missing_errors(frames: Frames, fractions: list[float]) -> Markup:
    prune = PRUNE.format(",".join(f"{fraction:g}" for fraction in fractions))
    how = Markup("The report has no errors to draw. Run <code>{}</code>, then <code>{}</code>.")
    return note(how.format(prune, REPORT.format(frames.run.path.name)))


def _at(fractions: list[float]) -> str:
    return f"at {', '.join(map(percent, fractions))} dense"


def _table(pruning: Pruning) -> Markup:
    heads = ["method", "pattern", "region", ">dense", ">pruned", ">output error", ">loss, nats"]
    lines = [
        [
            outcome.method,
            outcome.pattern,
            outcome.region,
            percent(outcome.dense),
            percent(outcome.sparsity),
            percent(round(outcome.errors[OUTPUT], 3)),
            "–" if outcome.loss is None else f"{outcome.loss:.3f}",
        ]
        for outcome in pruning.outcomes
    ]
    if pruning.loss is not None:
        lines.insert(0, ["none", "", "", percent(1), percent(0), "", f"{pruning.loss:.3f}"])
    return note(f"{pruning.weights}, SHA-256 {pruning.sha256}.") + html_table(heads, lines)
