"""The fastest case, in a sentence."""

from markupsafe import Markup

from sparsebench.results.tables.analysis import Analysis

TITLE, ORDER = "Somebody else's figure", 0


def draw(analysis: Analysis) -> Markup:
    return Markup("<p>Fastest: {}.</p>").format(
        analysis.cases.sort_values("median_us").label.iloc[0]
    )
