"""How the report writes tables, small print and data to download. Markup escapes what is put in."""

import base64
import gzip
from collections.abc import Iterable, Sequence
from itertools import repeat

import pandas as pd
from markupsafe import Markup

from sparsebench.results.frame import as_csv

PLAIN_BYTES = 20_000  # of CSV; more is packed, to a tenth


def table(
    heads: Sequence[str | Markup],
    rows: Iterable[Sequence[str | Markup]],
    classes: str = "",
    ids: Iterable[str] | None = None,
) -> Markup:
    """Return a table that scrolls sideways; a head `>...` is of a column of numbers.

    `ids` are of the rows: an address ends in one to lead there.
    """
    sides = ["num" if head.startswith(">") else "text" for head in heads]
    top = Markup("").join(
        Markup('<th scope="col" class="{}">{}</th>').format(
            side, head[1:] if side == "num" else head
        )
        for side, head in zip(sides, heads, strict=True)
    )
    lines = Markup("\n").join(
        Markup("<tr{}>{}</tr>").format(
            Markup(' id="{}"').format(own) if own else "",
            Markup("").join(
                Markup('<td class="{}">{}</td>').format(side, cell)
                for side, cell in zip(sides, row, strict=True)
            ),
        )
        for row, own in zip(rows, ids or repeat(""), strict=False)
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


def download(name: str, data: pd.DataFrame) -> Markup:
    """Return a link to these lines as CSV. The link holds them: the page is one file."""
    data_bytes, kind, name = as_csv(data).encode(), "text/csv", f"{name}.csv"
    if len(data_bytes) > PLAIN_BYTES:
        data_bytes, kind = gzip.compress(data_bytes, mtime=0), "application/gzip"
        name += ".gz"
    link = '<a class="csv" download="{}" href="data:{};base64,{}">{}</a>'
    return Markup(link).format(name, kind, base64.b64encode(data_bytes).decode(), name)
