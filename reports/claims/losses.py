"""The loss on held-out text against the speedup: the cost of pruning and its benefit.

    loss │           ┌─o 0      a point: one dense fraction (its number) at the speedup of a cell
         │     ┌─o 25┘          step: the front, the least loss at that speedup or more
         ┼ 100 ·················   dotted: the loss of the dense model
              1      speedup

Losses come from `sparsebench prune --json`, speedups from the cells of the claim.
"""

from collections.abc import Sequence

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._html import folded, note
from sparsebench.reports.figures._svg import Look, series
from sparsebench.reports.figures.pareto import front, steps
from sparsebench.reports.tables import html_table
from sparsebench.results.claims.cells import Cell
from sparsebench.results.formatting import between, percent
from sparsebench.results.model_files import Pruning, PruningOutcome

NEAR = 0.01  # tolerance of dense fractions, which are rounded to tiles
SIZE = (420, 260)


def losses(cells: Sequence[Cell], pruning: Pruning) -> Markup:
    """Draw loss against speedup, or a sentence if no cell has a pruned fraction."""
    points = [
        (cell, outcome)
        for cell in cells
        for outcome in pruning.outcomes
        if not cell.reason and outcome.loss is not None and _same(cell, outcome)
    ]
    if not points or pruning.loss is None:
        return note(f"No cell has a dense fraction to which {pruning.weights} was pruned.")
    methods = list(dict.fromkeys(_method(outcome) for _, outcome in points))
    chart = Chart(SIZE, "speedup, ×", "loss on held-out text, nats a token")
    chart.rule("y", pruning.loss, Look(dash="2 2", width=1), "dense")
    chart.rule("x", 1, Look(width=0.7))
    for number, method in enumerate(methods):
        chosen = [(c, o.loss or 0.0) for c, o in points if _method(o) == method]
        look = series(number).but(dash=None)
        values, heights = [c.value for c, _ in chosen], [loss for _, loss in chosen]
        chart.spans(heights, [c.low for c, _ in chosen], [c.high for c, _ in chosen], look, True)
        chart.line(values, heights, look, [f"{method}: {c.label}" for c, _ in chosen])
    for cell, outcome in {(o.dense, o.method, o.region): (c, o) for c, o in points}.values():
        chart.text(cell.value, outcome.loss or 0.0, f"{100 * outcome.dense:g}")
    worth = [(cell.value, (outcome.loss or 0.0) - pruning.loss) for cell, outcome in points]
    best = front(pd.DataFrame(worth, columns=["speedup", "error"]))
    steps(chart, best.assign(error=best.error + pruning.loss))
    drawn = chart.svg("loss on held-out text against speedup")
    words = (
        f"{pruning.weights}: {pruning.held_out:,} tokens held out of {pruning.tokens_from}. "
        f"The dotted line is the dense model ({pruning.loss:.3f}). Numbers are the percentage left "
        "dense. The step is the Pareto front with the dense model. The timed weights differ."
    )
    lines = [
        [_method(o), percent(o.dense), c.label, between(c.value, c.low, c.high), f"{o.loss:.3f}"]
        for c, o in points
    ]
    heads = ["pruned by", ">dense", "cell", ">speedup", ">loss, nats"]
    return drawn + note(words) + folded("The losses", html_table(heads, lines))


def _method(outcome: PruningOutcome) -> str:
    return f"{outcome.method}, {outcome.region}"


def _same(cell: Cell, outcome: PruningOutcome) -> bool:
    """Return whether a cell has the same dense fraction; 2:4 prunes half of the rest."""
    pattern = str(cell.fields.get("pattern", ""))
    spense = pattern.startswith("spense") or pattern == "two_four"
    hybrid = outcome.pattern == "2:4"  # these claims have no cells with zeros anywhere
    return spense and hybrid and abs(1 - 2 * (1 - cell.density) - outcome.dense) <= NEAR
