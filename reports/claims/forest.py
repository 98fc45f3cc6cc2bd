"""The cells of a test, one below the other, with their intervals, the threshold and the bound.

m 16, 90 %   ├──●──┤     :        ●  met   ○  missed   ◐  unclear (a square)
m 64, 90 %     ├─○─┤     :        :  the threshold
m 64, 95 %        ├──■───:─┤  |   |  the most that the device allows
All cells: linear, bf16           what they share is said once: labels are read on a telephone;
                                  the run too, where they are of several
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

from sparsebench.reports.figures._html import note
from sparsebench.reports.figures._svg import INK, OURS, PAPER, PEER, canvas, style, svg
from sparsebench.results.claims.cells import Cell, largest_value
from sparsebench.results.claims.decision import cell_state
from sparsebench.results.claims.metrics import METRICS, SIGNS
from sparsebench.results.claims.schema import Test
from sparsebench.results.formatting import amount

MOST = 24  # cells drawn; the others are in the table
LINE = 17  # CSS pixels a cell
WIDTH = 480
LONGEST = 48  # characters of a label
APART = 8.0  # largest over least value from which on the axis is logarithmic
LOOKS: dict[str, dict[str, Any]] = {
    "met": {"marker": "o", "color": OURS},
    "missed": {"marker": "o", "color": PEER, "markerfacecolor": PAPER},
    "unclear": {"marker": "s", "color": INK, "markerfacecolor": PAPER},
}


def forest(test: Test, cells: Sequence[Cell]) -> Markup:
    """Draw the cells of a device that have a value, the best first; nothing where there is none."""
    known = [cell for cell in cells if not cell.reason]
    if not known:
        return Markup("")
    known.sort(key=lambda cell: cell.value, reverse=test.at_least is not None)
    shown = _sample(known)
    with style():
        figure, axes = canvas((WIDTH, 60 + LINE * len(shown)), fitted=True)
        for place, cell in enumerate(reversed(shown)):
            look = LOOKS[cell_state(test, cell)]
            if cell.processes > 1:
                axes.hlines(place, cell.low, cell.high, color=look["color"], linewidth=1.4)
            axes.plot([cell.value], [place], linestyle="none", markersize=5, **look)
            if test.at_least is not None and (bound := largest_value(test, cell)):
                axes.plot([bound], [place], "|", color=INK, markersize=9)
        axes.axvline(test.limit, color=INK, linewidth=1.1, linestyle=(0, (2, 2)))
        none = METRICS[test.metric].none
        if none is not None:
            axes.axvline(none, color=INK, linewidth=0.7, alpha=0.5)
        shared, labels = _labels(shown)
        axes.set_yticks(np.arange(len(shown)), labels[::-1])
        axes.set_ylim(-0.7, len(shown) - 0.3)
        axes.tick_params(axis="y", length=0, labelsize=10)
        _across(axes, [*(c.value for c in shown), test.limit])
        axes.set_xlabel(f"{test.metric.replace('_', ' ')}, {SIGNS[test.unit].strip()}")
        axes.grid(axis="x", color=INK, alpha=0.12, linewidth=0.8)
        limit = f"{test.limit:g}{SIGNS[test.unit]}"
        drawn = svg(figure, f"{test.name}: {amount(len(shown), 'cell')}, threshold {limit}")
    left = len(known) - len(shown)
    said = "Dotted: the threshold. Line: the interval. "
    if test.at_least is not None and any(cell.bound for cell in shown):
        said += "Tick: the most that the device allows. "
    said += "Filled: beyond the threshold; open circle: short of it; open square: astride it."
    if left:
        said += f" Left out: {amount(left, 'cell')} between the best and the worst."
    who = "The cell" if len(shown) == 1 else "All cells"
    said += f" {who}: {shared}."
    return Markup('<div class="forest">%s</div>') % drawn + note(said)


def _sample(cells: list[Cell]) -> list[Cell]:
    """Keep at most MOST: the best half and the worst half."""
    if len(cells) <= MOST:
        return cells
    return [*cells[: MOST // 2], *cells[-MOST // 2 :]]


def _labels(cells: Sequence[Cell]) -> tuple[str, list[str]]:
    """Return what the labels of all cells share, with run and GPU, and the rest of each."""
    parts = [[*cell.label.split(", "), f"run {cell.run}", where(cell)] for cell in cells]
    shared = [part for part in parts[0] if all(part in each for each in parts)]
    own = [", ".join(part for part in each if part not in shared) for each in parts]
    return ", ".join(shared), [label[:LONGEST] for label in own]


def where(cell: Cell) -> str:
    """Name the device of a cell; a model of one is said to be that."""
    return cell.device.removeprefix("NVIDIA ") + (" (simulated)" if cell.simulated else "")


def _across(axes: Axes, values: list[float]) -> None:
    """Make the axis logarithmic where values are far apart."""
    low, high = min(values), max(values)
    if low > 0 and high / low > APART:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(7))
