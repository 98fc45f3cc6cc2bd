"""The whole time of calls whose mask changes, beside the time of each part (reports/parts.py)."""

from markupsafe import Markup

from sparsebench.reports.figures._html import NOTHING, note
from sparsebench.reports.parts import READ, parts
from sparsebench.results.tables.analysis import Analysis

TITLE = "Parts of a call"
ORDER = 31


def draw(analysis: Analysis) -> Markup:
    """Show the calls that have parts; NOTHING if the run has none."""
    tables = [table.html() for table in parts(analysis)]
    return note(READ) + Markup("").join(tables) if tables else NOTHING
