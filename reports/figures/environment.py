"""Every fact about the run in its environment.json and run.json."""

from markupsafe import Markup

from sparsebench.reports.figures._html import fold_away, note
from sparsebench.reports.tables import html_table
from sparsebench.results.run.provenance import flat
from sparsebench.results.tables.analysis import Analysis

TITLE = "Environment"
ORDER = 90


def draw(analysis: Analysis) -> Markup:
    """List the facts by name, and show the suite as it ran."""
    run = analysis.run
    facts = flat(run.environment) | flat(run.state, "run.")
    lines = [[name, value] for name, value in facts.items() if name.split(".")[-1] != "schema"]
    devices = ", ".join(sorted(analysis.rows.device.unique()))
    suite = Markup("<pre>{}</pre>").format(run.suite_text)
    return (
        note(f"Measured on {devices or 'no device'}.")
        + fold_away("All facts", html_table(["fact", "value"], lines))
        + fold_away("suite.yaml, as it ran", suite)
    )
