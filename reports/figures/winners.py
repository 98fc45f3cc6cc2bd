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
    "An outcome is relative to the baseline of the suite. (+3): three more processes would decide "
    "it. A case that was selected by the numbers shown here has to be confirmed in a separate run "
    "(sparsebench confirm)."
)


def draw(frames: Frames) -> Markup:
    """List the fastest case of each format in each problem."""
    if frames.raced.empty:
        return NOTHING
    table = results(frames)
    head = Markup("<b>{}</b>. {} {}").format(frames.device, intervals(frames.raced), table.title)
    words = f"{READ} {frames.noise.sentence}"
    return note(head) + replace(table, title="").html() + note(words)
