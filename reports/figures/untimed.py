"""The cases without a time, in a line for each reason."""

import re

from markupsafe import Markup

from sparsebench.reports.figures._figure import Frames
from sparsebench.reports.figures._html import note
from sparsebench.reports.terminal import missing
from sparsebench.results.formatting import amount
from sparsebench.results.record import Status

TITLE = "Cases without a time"
ORDER = 80


def draw(frames: Frames) -> Markup:
    """Count the cases by status, and write each reason; reasons may differ in their numbers."""
    cases = frames.cases.drop_duplicates(["case_id", "status", "detail"])  # one for all measures
    if cases.empty:
        return note("The run has no cases.")
    counts = [
        f"{n} {status}".replace("_", " ") for status, n in cases.status.value_counts().items()
    ]
    lines = [f"{amount(len(cases), 'case')}, with the A/A pairs: {', '.join(counts)}."]
    if alone := int(((cases.status == Status.OK) & cases.speedup.isna()).sum()):
        verb = "has" if alone == 1 else "have"
        why = "no speedup because no baseline of the problem is ok"
        lines.append(f"{amount(alone, 'ok case')} {verb} {why}.")
    details = cases.detail.replace("", "no reason given")
    alike = details.map(lambda detail: re.sub(r"\d[\d.e+-]*", "#", detail))
    first = details.groupby([cases.status, alike]).transform("first")
    lines += missing(cases.assign(detail=first), most=len(cases))
    return Markup("").join(map(note, lines))
