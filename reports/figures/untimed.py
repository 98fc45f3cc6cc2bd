"""Every case without a time: its status and the reason."""

import re

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import Frames, describe_line
from sparsebench.reports.figures._html import fold_away, note
from sparsebench.reports.tables import html_table
from sparsebench.results.formatting import amount
from sparsebench.results.record import Status
from sparsebench.results.tables.frame import fields

TITLE = "Cases without a time"
ORDER = 80


def draw(frames: Frames) -> Markup:
    """Group cases by status and by reason without its numbers; each group opens to its cases."""
    cases = frames.cases
    if cases.empty:
        return note("The run has no cases.")
    cases = cases.drop_duplicates(["case_id", "status", "detail"])  # one line for all measures
    bad = cases[cases.status != Status.OK]
    alone = cases[(cases.status == Status.OK) & cases.speedup.isna()]
    counts = [f"{n} {_with_spaces(status)}" for status, n in cases.status.value_counts().items()]
    head = note(f"{amount(len(cases), 'case')}, with the A/A pairs: {', '.join(counts)}.")
    if len(alone):
        verb = "has" if len(alone) == 1 else "have"
        why = "no speedup because no baseline of the problem is ok"
        head += note(f"{amount(len(alone), 'ok case')} {verb} {why}.")
    reasons = bad.detail.map(lambda detail: re.sub(r"\d[\d.e+-]*", "#", detail))
    groups = [group for _, group in bad.groupby([bad.status, reasons], sort=False)]
    groups.sort(key=lambda group: group.status.iloc[0] == Status.UNSUPPORTED)
    columns = ["status", ">cases", "reason", "contenders"]
    return head + html_table(columns, map(_line, groups)) if groups else head


def _line(group: pd.DataFrame) -> list[str]:
    names = [*fields(group), "label"]
    item, first = Markup("<li>{}{} <code>{}</code></li>"), group.iloc[0]
    items = [
        item.format(
            describe_line(line, names),
            "" if line.detail == first.detail else f": {line.detail}",
            line.case_id,
        )
        for _, line in group.iterrows()
    ]
    cases = Markup("<ul>{}</ul>").format(Markup("").join(items))
    return [
        _with_spaces(first.status),
        str(len(group)),
        fold_away(first.detail or "no reason given", cases),
        Markup("<br>").join(group.label.unique()),
    ]


def _with_spaces(status: object) -> str:
    return str(status).replace("_", " ")
