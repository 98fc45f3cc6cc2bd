"""The fastest kernel of each format in every problem, beside dense: the table of the terminal."""

from dataclasses import replace

from markupsafe import Markup

from sparsebench.reports.figures._figure import NOTHING, Frames
from sparsebench.reports.figures._html import note
from sparsebench.reports.figures._verdict import intervals
from sparsebench.reports.terminal import results

TITLE = "Fastest kernel of each format"
ORDER = 15

READ = (
    "Outcomes are relative to the baseline of the suite. “not settled (+3)” means that three more "
    "processes would settle it. These numbers also selected the fastest cases, so confirm such a "
    "case in a separate run (sparsebench confirm)."
)


def draw(frames: Frames) -> Markup:
    """List the fastest case of each format in each problem."""
    if frames.raced.empty:
        return NOTHING
    table = results(frames)
    shared = table.title.partition("brackets: ")[0].rstrip("; ")  # the head has them too
    head = Markup("<b>{}</b>. {} {}").format(frames.device, intervals(frames.raced), shared)
    words = f"{READ} {frames.noise.sentence}"
    return note(head) + replace(table, title="").html() + note(words)
