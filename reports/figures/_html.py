"""How the report writes numbers, tables and small print. Markup escapes whatever is put into it."""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from markupsafe import Markup


def plain(value: Any) -> str:
    """Write a number with four significant digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def percent(level: float) -> str:
    """Write a sparsity in percent, with at most two decimals."""
    return "–" if pd.isna(level) else f"{round(100 * level, 2):g} %"


def times(ratio: float) -> str:
    """Write a ratio with three significant digits and its sign: 12.3×."""
    return "–" if pd.isna(ratio) else f"{three(ratio)}×"


def three(ratio: float) -> str:
    """Write a ratio with three significant digits, at most three after the point: 12.3."""
    return f"{ratio:.{max(0, min(3, 2 - _magnitude(ratio)))}f}"


def significant(value: Any, digits: int = 3) -> str:
    """Write a number with so many significant digits and no exponent; a dash for NaN."""
    if pd.isna(value):
        return "–"
    if value == 0:
        return "0"
    return f"{float(value):,.{max(0, digits - 1 - _magnitude(float(value)))}f}"


def table(
    heads: Sequence[str | Markup], rows: Iterable[Sequence[str | Markup]], classes: str = ""
) -> Markup:
    """Return a table that scrolls sideways; a head `>...` is of a column of numbers."""
    sides = ["num" if head.startswith(">") else "text" for head in heads]
    top = Markup("").join(
        Markup('<th class="{}">{}</th>').format(side, head[1:] if side == "num" else head)
        for side, head in zip(sides, heads, strict=True)
    )
    lines = Markup("\n").join(
        Markup("<tr>{}</tr>").format(
            Markup("").join(
                Markup('<td class="{}">{}</td>').format(side, cell)
                for side, cell in zip(sides, row, strict=True)
            )
        )
        for row in rows
    )
    return Markup(
        '<div class="scroll"><table class="{}"><thead><tr>{}</tr></thead>'
        "<tbody>\n{}\n</tbody></table></div>"
    ).format(classes, top, lines)


def without_dashes(
    heads: Sequence[str], rows: Sequence[Sequence[str | Markup]]
) -> tuple[list[str], list[list[str | Markup]]]:
    """Leave out the columns of a table that are a dash in every row."""
    kept = [i for i in range(len(heads)) if not rows or any(row[i] != "–" for row in rows)]
    return [heads[i] for i in kept], [[row[i] for i in kept] for row in rows]


def note(text: str | Markup) -> Markup:
    """Return a paragraph in small print."""
    return Markup('<p class="note">{}</p>').format(text)


def folded(title: str, body: Markup) -> Markup:
    """Return a title that opens to a body."""
    return Markup("<details><summary>{}</summary>{}</details>").format(title, body)


def _magnitude(value: float) -> int:
    return len(f"{abs(value):.0f}") - 1 if abs(value) >= 1 else int(f"{value:e}"[-3:])
