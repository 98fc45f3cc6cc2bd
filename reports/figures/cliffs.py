"""Where fewer tokens take longer than more: the time over the least time of more tokens."""

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import NOTHING, Frames, each_measure, named
from sparsebench.reports.figures._html import note
from sparsebench.reports.tables import html_table
from sparsebench.results.formatting import significant
from sparsebench.results.frame import fields

TITLE = "Cliffs in the number of tokens"
ORDER = 45

COUNTS = 12  # numbers of tokens that a run must have
LIMIT = 1.05  # ratio that is listed
REST = "seed", "sparsity", "m"  # fields in which the cases of a line may differ


def draw(frames: Frames) -> Markup:
    """List the cases that take LIMIT times as long as a case of more tokens."""
    if frames.raced.m.nunique() < COUNTS:
        return NOTHING
    return each_measure(frames.raced, _draw)


def _draw(raced: pd.DataFrame) -> Markup:
    lines, cases = [], 0
    key = ["op", *(name for name in fields(raced) if name not in REST), "level", "label"]
    for _, group in raced.groupby(key, sort=False, dropna=False):
        line = group.sort_values("m")
        least = line.median_us[::-1].cummin()[::-1].shift(-1)
        ratio = line.median_us / least
        cases += int(ratio.notna().sum())
        for at in ratio[ratio > LIMIT].sort_values(ascending=False).index:
            more = line.m[line.median_us == least[at]].iloc[-1]
            us = f"{significant(line.median_us[at])} µs", f"{significant(least[at])} µs at m {more}"
            where = named(line.loc[at], [*key, "m"])
            lines.append((float(ratio[at]), [where, f"{ratio[at]:.2f}", *us]))
    head = f"{len(lines)} of {cases} cases take more than {LIMIT} times as long as a case of more "
    head += "tokens. Another plan, made for more tokens, would be faster there."
    if not lines:
        return note(head)
    listed = [line for _, line in sorted(lines, key=lambda each: -each[0])]
    return note(head) + html_table(["case", ">ratio", ">time", ">least of more tokens"], listed)
