"""Where and how the run was made: every fact of its environment.json and run.json."""

from markupsafe import Markup

from sparsebench.reports.figures._figure import Frames
from sparsebench.reports.figures._html import folded, note
from sparsebench.reports.tables import html_table
from sparsebench.results.provenance import flat

TITLE = "Environment"
ORDER = 90


def draw(frames: Frames) -> Markup:
    """List the facts by name, and show the suite as it was run."""
    run = frames.run
    facts = flat(run.environment) | flat(run.state, "run.")
    facts.pop("schema", None), facts.pop("run.schema", None)
    devices = ", ".join(sorted(frames.rows.device.unique()))
    body = html_table(["fact", "value"], [[name, value] for name, value in facts.items()])
    suite = Markup("<pre>{}</pre>").format(run.suite_text)
    return (
        note(f"Measured on: {devices or 'nothing'}.")
        + folded("All facts", body)
        + (folded("suite.yaml, as run", suite))
    )
