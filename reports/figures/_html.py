"""Small print, folded parts, drawings, cells of maps and data to download, as escaped HTML."""

import base64
import gzip
from collections.abc import Iterable

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._svg import shade
from sparsebench.results.tables.frame import as_csv

NOTHING = Markup("")  # of a figure that does not apply to a run
PLAIN_BYTES = 20_000  # larger CSV is compressed, to about a tenth


def note(text: str | Markup) -> Markup:
    """Return a paragraph in small print."""
    return Markup('<p class="note">{}</p>').format(text)


def fold_away(title: str, body: Markup) -> Markup:
    """Return a title that opens to a body."""
    return Markup("<details><summary>{}</summary>{}</details>").format(title, body)


def wide(drawing: Markup) -> Markup:
    """Return a drawing that takes the width of the page."""
    return Markup('<figure class="wide">{}</figure>').format(drawing)


def beside(drawn: Iterable[tuple[str, Markup, Markup | str]]) -> Markup:
    """Lay out drawings side by side, each with its title and its caption."""
    figure = Markup("<figure><h3>{}</h3>{}<figcaption>{}</figcaption></figure>")
    figures = Markup("").join(figure.format(*each) for each in drawn)
    return Markup('<div class="panels">{}</div>').format(figures)


def shaded(gain: float, decided: bool, link: str, title: str, text: Markup) -> Markup:
    """Return a cell of a map: a link in the colour of a gain, hatched unless it is decided."""
    paint, ink = shade(gain)
    look = '<a class="cell{}" href="{}"{} style="background-color:{};color:{}" title="{}">{}</a>'
    here = Markup(" data-cell") if link.startswith("#") else ""
    hatched = "" if decided else " undecided"
    return Markup(look).format(hatched, link, here, paint, ink, title, text)


def download(name: str, data: pd.DataFrame) -> Markup:
    """Return a link that holds these lines as CSV, because the page is a single file."""
    data = data.drop(columns="blocks", errors="ignore")  # arrays, which no spreadsheet reads
    content, kind, name = as_csv(data).encode(), "text/csv", f"{name}.csv"
    if len(content) > PLAIN_BYTES:
        content, kind, name = gzip.compress(content, mtime=0), "application/gzip", f"{name}.gz"
    link = '<a class="csv" download="{}" href="data:{};base64,{}">{}</a>'
    return Markup(link).format(name, kind, base64.b64encode(content).decode(), name)
