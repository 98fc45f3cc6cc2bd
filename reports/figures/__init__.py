"""The figures of a report, one per file, which the report finds by its name.

TITLE = "Roofline"                             the heading
ORDER = 66                                     the place on the page: smaller comes first
def draw(analysis: Analysis) -> Markup: ...    HTML that loads nothing; NOTHING if none applies

`analysis` has the tables of the run (results/tables/analysis.py).
"""
