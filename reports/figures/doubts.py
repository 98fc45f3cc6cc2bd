"""Tuned contenders that are slower than their defaults, found by results/tuning_doubts.py."""

from markupsafe import Markup

from sparsebench.reports.figures._figure import NOTHING, Frames
from sparsebench.reports.figures._html import note
from sparsebench.reports.tables import html_table
from sparsebench.results.tuning_doubts import SLOWER, doubts

TITLE = "Choices in doubt"
ORDER = 76

READ = (
    "Tuning should make nobody slower. These contenders took more than {:.0f} % longer than with "
    "their defaults, in the same contest or in their own search. A lead over them may be a lead "
    "over a bad choice."
)


def draw(frames: Frames) -> Markup:
    """List them, with what was expected of each."""
    lines: list[list[str | Markup]] = [[d.case, d.expected, d.found] for d in doubts(frames.rows)]
    if not lines:
        return NOTHING
    said = READ.format(100 * (SLOWER - 1))
    return note(said) + html_table(["case", "expected", "found"], lines)
