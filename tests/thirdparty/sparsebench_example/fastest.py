"""The fastest case, in a sentence."""

from markupsafe import Markup

from sparsebench.reports.figures._figure import Frames

TITLE, ORDER = "Somebody else's figure", 0


def draw(frames: Frames) -> Markup:
    return Markup("<p>Fastest: {}.</p>").format(frames.cases.sort_values("median_us").label.iloc[0])
