"""The cells of a test with their intervals, the threshold and the bound, one per line.

m 16, 90 %   ├──●──┤     :        ●  met   ○  missed   ◐  not settled (a square)
m 64, 90 %     ├─○─┤     :        :  the threshold
m 64, 95 %        ├──■───:─┤  |   |  the upper bound on this device
All cells: linear, bf16           what the labels share, because they must fit a phone
"""

from collections.abc import Sequence

from markupsafe import Markup

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._html import note
from sparsebench.reports.figures._svg import INK, OURS, PEER, Look
from sparsebench.results.claims.cells import Cell, largest_value, value_text
from sparsebench.results.claims.decision import cell_state
from sparsebench.results.claims.metrics import METRICS, SIGNS
from sparsebench.results.claims.schema import Test
from sparsebench.results.formatting import amount

MOST = 24  # cells drawn; the table lists the others
LINE = 17  # CSS pixels per cell
WIDTH, LONGEST = 480, 34  # CSS pixels of the figure; characters of a label
APART = 8.0  # the axis is logarithmic if the largest value is more than this times the least
KEPT = ("n", "level", "block")  # parts that a long label keeps
LOOKS = {
    "met": Look(OURS, "o", None, 1.4, 5),
    "missed": Look(PEER, "o", None, 1.4, 5, hollow=True),
    "not settled": Look(INK, "s", None, 1.4, 5, hollow=True),
}


def forest(test: Test, cells: Sequence[Cell]) -> Markup:
    """Draw the cells of a device that have a value, the best first; "" if there are none."""
    valued = [cell for cell in cells if not cell.reason]
    if not valued:
        return Markup("")
    valued.sort(key=lambda cell: cell.value, reverse=test.at_least is not None)
    shown = _sample(valued)
    shared, labels = _labels(shown)
    metric = f"{test.metric.replace('_', ' ')}, {SIGNS[test.unit].strip()}"
    least, most = min(c.value for c in shown), max(c.value for c in shown)
    apart = least > 0 and max(most, test.limit) / min(least, test.limit) > APART
    chart = Chart((WIDTH, 60 + LINE * len(shown)), metric, log="x" if apart else "")
    chart.limits["y"] = (-0.7, len(shown) - 0.3)
    chart.ticks["y"] = [*enumerate(labels[::-1])]
    chart.rule("x", test.limit, Look(dash="2 2", width=1.1))
    if (none := METRICS[test.metric].none) is not None:
        chart.rule("x", none, Look(width=0.7, alpha=0.5))
    for place, cell in enumerate(reversed(shown)):
        look = LOOKS[cell_state(test, cell)]
        if cell.processes > 1:
            chart.spans([place], [cell.low], [cell.high], look, across=True)
        chart.line([cell.value], [place], look, [f"{cell.label}: {value_text(test, cell)}"])
        if test.at_least is not None and (bound := largest_value(test, cell)):
            chart.line([bound], [place], Look(marker="|", size=9))
    limit = f"{test.limit:g}{SIGNS[test.unit]}"
    drawn = chart.svg(f"{test.name}: {amount(len(shown), 'cell')}, threshold {limit}")
    left = len(valued) - len(shown)
    words = "The dotted line is the threshold. Lines and brackets are 95 % intervals, or the range "
    words += "over processes or seeds where the text says so. "
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
    """Return the parts that all labels share, with run and GPU, and the rest of each label.

    Runs are left out where they differ, because the table has them. A long label also loses other
    parts, such as the path of a file, from its end as long as no two labels become the same.
    """
    parts = [{**c.label_parts, "run": f"run {c.run}", "where": where(c)} for c in cells]
    shared = [part for part in parts[0].items() if all(part in each.items() for each in parts)]
    rest = [dict(part for part in each.items() if part not in shared) for each in parts]
    for name in dict.fromkeys(name for each in rest for name in reversed(each)):
        shorter = [{n: text for n, text in each.items() if n != name} for each in rest]
        long = name == "run" or max(len(", ".join(each.values())) for each in rest) > LONGEST
        if (
            name not in KEPT
            and long
            and len({tuple(each.values()) for each in shorter}) == len(cells)
        ):
            rest = shorter
    texts = [", ".join(each.values()) for each in rest]
    return ", ".join(text for _, text in shared), [*map(_cut, texts)]


def _cut(label: str) -> str:
    """Cut the middle of a long label; tooltips and the table have all of it."""
    half = LONGEST // 2
    return label if len(label) <= LONGEST else f"{label[:half]}…{label[1 - half :]}"


def where(cell: Cell) -> str:
    """Name the device of a cell, and whether it is simulated."""
    return cell.device.removeprefix("NVIDIA ") + (" (simulated)" if cell.simulated else "")
