"""The fastest kernel of each format in every problem, beside dense: the table of the terminal."""

from dataclasses import replace

from markupsafe import Markup

from sparsebench.reports.figures._html import NOTHING, note
from sparsebench.reports.terminal import results
from sparsebench.results.formatting import brackets, capital
from sparsebench.results.tables.analysis import Analysis

TITLE = "Fastest kernel of each format"
ORDER = 15

READ = (
    "Outcomes are relative to the baseline of the suite. “not settled (+3)” means that three more "
    "processes would settle it. These numbers also selected the fastest cases, so confirm such a "
    "case in a separate run (sparsebench confirm)."
)


def draw(analysis: Analysis) -> Markup:
    """List the fastest case of each format in each problem."""
    if analysis.timed.empty:
        return NOTHING
    table = results(analysis)
    shared = table.title.partition("brackets: ")[0].rstrip("; ")  # the head has them too
    held = capital(brackets(analysis.timed.gain_interval))
    head = Markup("<b>{}</b>. {}. {}").format(analysis.device, held, shared)
    words = f"{READ} {analysis.noise.sentence}"
    return note(head) + replace(table, title="").html() + note(words)
