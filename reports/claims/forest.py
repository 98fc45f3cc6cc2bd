"""The cells of a test with their intervals, the threshold and the bound, one per line.

m 16, 90 %   ├──●──┤     :        ●  met   ○  missed   ◐  not settled (a square)
m 64, 90 %     ├─○─┤     :        :  the threshold
m 64, 95 %        ├──■───:─┤  |   |  the upper bound on this device
All cells: linear, bf16           what the labels share, because they must fit a phone
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

MOST = 24  # cells drawn; the table lists the others
LINE = 17  # CSS pixels per cell
WIDTH = 480
LONGEST = 48  # characters of a label
APART = 8.0  # the axis is logarithmic if the largest value is more than this times the least
LOOKS: dict[str, dict[str, Any]] = {
    "met": {"marker": "o", "color": OURS},
    "missed": {"marker": "o", "color": PEER, "markerfacecolor": PAPER},
    "not settled": {"marker": "s", "color": INK, "markerfacecolor": PAPER},
}


def forest(test: Test, cells: Sequence[Cell]) -> Markup:
    """Draw the cells of a device that have a value, the best first; "" if there are none."""
    valued = [cell for cell in cells if not cell.reason]
    if not valued:
        return Markup("")
    valued.sort(key=lambda cell: cell.value, reverse=test.at_least is not None)
    shown = _sample(valued)
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
    left = len(valued) - len(shown)
    words = "The dotted line is the threshold, and lines are intervals. "
    if test.at_least is not None and any(cell.bound for cell in shown):
        words += "Ticks are the upper bounds of the device. "
    words += "Filled circles meet the threshold, open circles miss it, open squares span it."
    if left:
        words += f" Left out: {amount(left, 'cell')} between the best and the worst."
    words += f" {'The cell' if len(shown) == 1 else 'All cells'}: {shared}."
    return Markup('<div class="forest">%s</div>') % drawn + note(words)


def _sample(cells: list[Cell]) -> list[Cell]:
    """Keep at most MOST cells: the best half and the worst half."""
    if len(cells) <= MOST:
        return cells
    return [*cells[: MOST // 2], *cells[-MOST // 2 :]]


def _labels(cells: Sequence[Cell]) -> tuple[str, list[str]]:
    """Return the parts that all labels share, with run and GPU, and the rest of each label."""
    parts = [[*cell.label.split(", "), f"run {cell.run}", where(cell)] for cell in cells]
    shared = [part for part in parts[0] if all(part in each for each in parts)]
    labels = [", ".join(part for part in each if part not in shared) for each in parts]
    return ", ".join(shared), [label[:LONGEST] for label in labels]


def where(cell: Cell) -> str:
    """Name the device of a cell, and whether it is simulated."""
    return cell.device.removeprefix("NVIDIA ") + (" (simulated)" if cell.simulated else "")


def _across(axes: Axes, values: list[float]) -> None:
    """Make the axis logarithmic if the values are far apart."""
    low, high = min(values), max(values)
    if low > 0 and high / low > APART:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(7))
