"""Where fewer tokens take longer than more: the time over the least time of more tokens."""

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import NOTHING, Frames, describe_line, each_measure
from sparsebench.reports.figures._html import note
from sparsebench.reports.tables import html_table
from sparsebench.results.formatting import duration
from sparsebench.results.tables.cliffs import COUNTS, LIMIT, key, ratios, sentence

TITLE = "Cliffs in the number of tokens"
ORDER = 45


def draw(frames: Frames) -> Markup:
    """List the cases that take LIMIT times as long as a case of more tokens."""
    if frames.raced.m.nunique() < COUNTS:
        return NOTHING
    return each_measure(frames.raced, _draw)


def _draw(raced: pd.DataFrame) -> Markup:
    every = ratios(raced)
    lines = [
        [
            describe_line(line, [*key(raced), "m"]),
            f"{line.ratio:.2f}",
            duration(line.median_us),
            f"{duration(line.least_us)} at m {line.more}",
        ]
        for _, line in every[every.ratio > LIMIT].iterrows()
    ]
    if not lines:
        return note(sentence(raced))
    head = f"{sentence(raced)} The plan for more tokens would be faster there."
    return note(head) + html_table(["case", ">ratio", ">time", ">least of more tokens"], lines)
