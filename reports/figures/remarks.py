"""What the other figures leave out, in a line each.

costs      bytes and conversion, by format
doubts     tuned contenders that are slower than their defaults (results/tables/tuning_doubts.py),
           and fewer tokens that take longer than more (results/tables/cliffs.py)
no time    how many cases have none, and each reason

A call saves the baseline's time minus its own, so the calls that pay back a conversion are its time
over the saved time. The table of every case has the columns behind the costs.
"""

import re
from collections.abc import Iterator
from math import ceil

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._html import note
from sparsebench.reports.terminal import missing
from sparsebench.results.formatting import FORMATS, amount, duration, significant
from sparsebench.results.problem_names import problem_name
from sparsebench.results.record import Status
from sparsebench.results.tables import cliffs
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.contests import usual
from sparsebench.results.tables.tuning_doubts import doubts

TITLE = "Costs, doubts, and cases without a time"
ORDER = 80


def draw(analysis: Analysis) -> Markup:
    """Write one line for each cost, doubt and reason."""
    if analysis.cases.empty:
        return note("The run has no cases.")
    tuned = [f"Slower than with its defaults: {doubt}." for doubt in doubts(analysis.rows)]
    timed = usual(analysis.timed)
    lines = [*_costs(timed), *tuned, *_cliffs(timed), *_untimed(analysis.cases)]
    return Markup("").join(map(note, lines))


def _costs(timed: pd.DataFrame) -> Iterator[str]:
    """Yield a text for each format: its bytes, its conversion, and when that is paid back.

    Models are left out: their rows have the conversion of one layer.
    """
    if timed.empty:
        return
    timed = timed[timed.layers.isna()] if "layers" in timed else timed
    for name, cases in timed[timed.side != "dense"].groupby("format", sort=False):
        share = cases.bytes_of_dense.dropna()
        ends = "–".join(dict.fromkeys(significant(end) for end in (share.min(), share.max())))
        texts = [f"{ends} of the dense bytes"] if len(share) else []
        converted = cases[cases.convert_us.notna()]
        if len(converted):
            faster = converted[converted.speedup_low > 1]
            calls = (faster.convert_us / (faster.median_us * (faster.speedup - 1))).map(ceil)
            ends = "–".join(dict.fromkeys(f"{end:,}" for end in (calls.min(), calls.max())))
            paid = f"paid back after {ends} calls" if len(calls) else "never paid back"
            texts.append(f"conversion {duration(converted.convert_us.median())}, {paid}")
        if texts:
            yield f"{FORMATS.get(str(name), str(name))}: {'; '.join(texts)}."


def _cliffs(timed: pd.DataFrame) -> Iterator[str]:
    if not (count := cliffs.sentence(timed)):
        return
    yield count
    every = cliffs.ratios(timed)
    for _, line in every[every.ratio > cliffs.LIMIT].iterrows():
        where = problem_name(dict(line), [*cliffs.key(timed), "m"])
        more = f"m {line.more} takes {duration(line.least_us)}"
        yield f"{where}: {duration(line.median_us)}, and {more}."


def _untimed(cases: pd.DataFrame) -> Iterator[str]:
    """Yield the count by status, and each reason; reasons may differ in their numbers."""
    cases = cases.drop_duplicates(["case_id", "status", "detail"])  # one for all measures
    counts = [
        f"{n} {status}".replace("_", " ") for status, n in cases.status.value_counts().items()
    ]
    yield f"{amount(len(cases), 'case')}, with the A/A pairs: {', '.join(counts)}."
    if alone := int(((cases.status == Status.OK) & cases.speedup.isna()).sum()):
        verb = "has" if alone == 1 else "have"
        why = "no speedup because no baseline of the problem is ok"
        yield f"{amount(alone, 'ok case')} {verb} {why}."
    details = cases.detail.replace("", "no reason given")
    alike = details.map(lambda detail: re.sub(r"\d[\d.e+-]*", "#", detail))
    first = details.groupby([cases.status, alike]).transform("first")
    yield from missing(cases.assign(detail=first), most=len(cases))
