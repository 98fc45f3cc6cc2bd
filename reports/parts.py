"""Attention whose mask changes in every call: the time of each part beside the whole call.

    problem       contender                  whole    score    select   attention  the rest
    m 16k, 90 %   attention_selected pooled  396 µs  82.0 µs  10.0 µs     314 µs      21 %
                  flex_attention plans       820 µs        –        –     480 µs      41 %

"the rest" is the share of the whole call that its attention does not take. The table is for the
terminal, Markdown and the report (figures/parts.py).
"""

from collections.abc import Mapping
from typing import Any

from sparsebench.reports.tables import Cell, Table
from sparsebench.results.formatting import NONE, duration, percent
from sparsebench.results.problem_names import problem_namer
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.contests import usual
from sparsebench.results.tables.frame import fields, records
from sparsebench.results.tables.parts import parts_of

LAST = "attention"  # the part that a call with a known mask has alone
ORDER = "score", "select", "lists", "plan"  # in which a call runs its parts; others follow
READ = (
    "Each part is timed alone, with a cold cache, so the parts do not add up to the whole: a part "
    "finds nothing in the L2 cache, and has a higher clock if power limits the whole call. "
    "The rest: the share of the whole call that its attention, alone, does not take. It is what a "
    "mask that changes costs."
)


def parts(analysis: Analysis) -> list[Table]:
    """Return a table of the calls that have parts, or none if the run has no such call."""
    by_case = parts_of(analysis.run.rows)
    if analysis.timed.empty or not by_case:
        return []
    timed = usual(analysis.timed)
    calls = timed[timed.case_id.isin(by_case)]
    if calls.empty:
        return []
    present = dict.fromkeys(name for case in calls.case_id for name in by_case[case])
    names = sorted(present, key=lambda n: (n == LAST, ORDER.index(n) if n in ORDER else len(ORDER)))
    name_of, common = problem_namer(calls, fields(calls))
    lines = [[name_of(c), *_cells(c, by_case[c["case_id"]], names)] for c in records(calls)]
    return [
        Table(
            title=f"The whole call and its parts: {common}",
            columns=["problem", "contender", "whole", *names, "the rest"],
            lines=lines,
            words=["problem", "contender"],
        )
    ]


def _cells(call: Mapping[str, Any], of_call: Mapping[str, float], names: list[str]) -> list[Cell]:
    whole_us = call["median_us"]
    rest = percent(round(max(0.0, 1 - of_call[LAST] / whole_us), 2)) if LAST in of_call else NONE
    times = [duration(of_call[name]) if name in of_call else NONE for name in names]
    return [str(call["name"]), duration(whole_us), *times, rest]
