"""Tuned contenders that are slower than with their defaults (results/tables/tuning_doubts.py)."""

from markupsafe import Markup

from sparsebench.reports.figures._figure import NOTHING, Frames
from sparsebench.reports.figures._html import note
from sparsebench.reports.tables import html_table
from sparsebench.results.tables.tuning_doubts import SLOWER, doubts

TITLE = "Badly tuned contenders"
ORDER = 76

READ = (
    "Tuning should never slow a kernel down. These tuned contenders took more than {:.0f} % longer "
    "than the same kernel with its defaults, so a lead over them may come from a bad choice."
)


def draw(frames: Frames) -> Markup:
    """List these contenders with the expected time and the measured one."""
    lines = [[d.case, d.expected_time, d.measured_time] for d in doubts(frames.rows)]
    if not lines:
        return NOTHING
    body = html_table(["case", "expected", "measured"], lines)
    return note(READ.format(100 * (SLOWER - 1))) + body
