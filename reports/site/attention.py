"""The page "From which length on?": when attention that selects its keys beats dense attention.

    a sentence for each phase without a row    what is missing, and what measures it
    phase ▾ heads ▾ dtype ▾ GPU ▾              selects of what differs show one group: a sentence,
                                               a chart of the lengths above the shortest measured
                                               one, a table
    quality                                    what a model loses, beside its time

It rests on the packaged rows (results/advice/crossings.py). attention.json beside it has the same
for an engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from markupsafe import Markup

from sparsebench.reports import crossings
from sparsebench.reports.figures._chart import named_rows
from sparsebench.reports.figures._html import NOTHING
from sparsebench.reports.figures._svg import ROLES
from sparsebench.reports.page import render
from sparsebench.reports.site.pages import Site
from sparsebench.results.advice.crossings import (
    FILE,
    AttentionEvidence,
    CurvePoint,
    SelectionCurve,
    packaged_attention,
)

PAGE = "attention.html"
WIDTH, ROW, MARGIN = 400, 20, 1.15
CHOICES = "phase", "heads", "dtype", "GPU"


def pages(site: Site, evidence: AttentionEvidence | None = None) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of the page, and of its JSON."""
    evidence = evidence or packaged_attention()
    every = sorted(crossings.groups(evidence.curves), key=lambda group: -len(group[1]))
    choices = [dict(zip(CHOICES, words, strict=True)) for words, _ in every]
    groups = [
        (", ".join(words), crossings.finding(of), chart(of), crossings.table("", of).html())
        for words, of in every
    ]
    qualities = [
        (table.title, table.html(), crossings.quality_note(each))
        for each in evidence.quality
        for table in [crossings.quality_table(each)]
    ]
    names = [[field.name for field in fields(of)] for of in (SelectionCurve, CurvePoint)]
    values: dict[str, Any] = {"missing": crossings.missing(evidence.curves)}
    values |= {"notes": crossings.NOTES, "groups": groups, "qualities": qualities}
    values |= {"choices": choices, "names": CHOICES, "file": FILE, "fields": names}
    yield PAGE, render("site_attention.html", site=site, **values)
    yield FILE, evidence.text


def chart(every: Sequence[SelectionCurve]) -> Markup:
    """Draw the lengths from which on each curve is faster, with their intervals.

    A curve that is faster at the shortest length is left out. If all are, return NOTHING. A curve
    that is not faster at the longest length has no marker.
    """
    curves = [curve for curve in every if curve.faster_from != curve.points[0].tokens]
    if not curves:
        return NOTHING
    names = [f"{crossings.name_of(c)} {c.block[1]}, {crossings.kept_of(c)} kept" for c in curves]
    drawing = named_rows(names, WIDTH, ROW, "faster from, tokens", log="x")
    lengths = sorted({point.tokens for curve in curves for point in curve.points})
    drawing.limits["x"] = lengths[0] / MARGIN, lengths[-1] * MARGIN
    drawing.ticks["x"] = [(n, f"{n // 1024}k" if n % 1024 == 0 else f"{n:,}") for n in lengths]
    look = ROLES["ours"].but(dash=None)
    for row, curve in enumerate(curves):
        last = curve.points[-1].tokens
        ends = curve.maybe_from or last, curve.surely_from or last
        if curve.maybe_from:
            drawing.spans([row], [ends[0]], [ends[1]], look, across=True)
        if curve.faster_from:
            title = f"{names[row]}: {crossings.when(curve)}"
            drawing.line([curve.faster_from], [row], look, [title])
    return drawing.svg("Context lengths from which on selecting keys is faster than dense")
