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
from matplotlib.ticker import MaxNLocator

from sparsebench.reports.figures._html import folded, note
from sparsebench.reports.figures._svg import INK, canvas, series, style, svg
from sparsebench.reports.figures.pareto import front
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
    with style():
        figure, axes = canvas(SIZE)
        for number, method in enumerate(methods):
            chosen = [(c, o) for c, o in points if _method(o) == method]
            look = series(number) | {"linestyle": "none", "label": method}
            axes.plot([c.value for c, _ in chosen], [o.loss or 0.0 for _, o in chosen], **look)
            for cell, outcome in chosen:
                axes.hlines(outcome.loss or 0.0, cell.low, cell.high, color=look["color"])
        for cell, outcome in {(o.dense, o.method, o.region): (c, o) for c, o in points}.values():
            place, text = (cell.value, outcome.loss or 0.0), f"{100 * outcome.dense:g}"
            axes.annotate(text, place, xytext=(4, 4), textcoords="offset points", fontsize=8)
        worth = [(cell.value, (outcome.loss or 0.0) - pruning.loss) for cell, outcome in points]
        steps = front(pd.DataFrame(worth, columns=["speedup", "error"]))
        axes.step(steps.speedup, steps.error + pruning.loss, where="pre", color=INK, linewidth=1)
        axes.axhline(pruning.loss, color=INK, linewidth=1, linestyle=(0, (2, 2)))
        axes.axvline(1, color=INK, linewidth=0.7, alpha=0.5)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.set_xlabel("speedup, ×")
        axes.set_ylabel("loss on held-out text, nats a token")
        drawn = svg(figure, "loss on held-out text against speedup")
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
