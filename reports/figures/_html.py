"""How the report writes small print and data to download. Markup escapes what is put in."""

import base64
import gzip

import pandas as pd
from markupsafe import Markup

from sparsebench.results.frame import as_csv

PLAIN_BYTES = 20_000  # of CSV; more is packed, to a tenth


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
