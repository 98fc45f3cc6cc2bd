"""How often a second card agrees with the first, in sentences and a table (results/repeats.py).

runs  configurations  cases  second value inside  difference covers 0   inside      covers 0
                             by the processes alone                     and by what cards differ
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from sparsebench.results.between_cards import State, packaged
from sparsebench.results.formatting import amount, significant
from sparsebench.results.record import POWER_LIMITED
from sparsebench.results.repeats import COUNTS, are_published, coverage

COVERAGE = ["first run", "second run", "configurations", "cases"]
COVERAGE += ["inside, processes alone", "covers 0, processes alone", "inside", "covers 0"]
SEARCHED, INHERITED = "both searched", "the second inherited them"
WHERE = {
    State.FREE: "",
    State.LIMITED: f" if power or heat limited a board for more than {100 * POWER_LIMITED:g} % of "
    "the time",
    State.INHERITED: " if a run inherited its configurations from another card",
}


def explained(repeats: pd.DataFrame) -> list[str]:
    """Return sentences that explain the table and the variation between cards."""
    parts = [
        f"{significant(100 * entry.sd, 2)} %{WHERE[state]} ({amount(entry.cases, 'case')} in "
        f"{amount(entry.pairs, 'pair')} of runs, "
        f"{significant(entry.freedom, 2)} degrees of freedom)"
        for state, entry in packaged().items()
    ]
    scatter = (
        "Beyond the processes of a run, the published speedups scatter over cards with a standard "
        f"deviation of {'; '.join(parts)}."
    )
    if repeats.empty:
        return ["No case was measured on two cards of one kind yet.", scatter]
    without = "; for this table, it was estimated without the pair of the line"
    return [
        "Each line is a pair of runs that measured the same cases with the same code on different "
        "cards of one kind.",
        "Inside: the first interval contains the second value, which eight independent processes "
        "give in 88 % of cases.",
        "Covers 0: the 95 % interval of the difference contains 0.",
        "By the processes alone, intervals are too narrow for a second card.",
        scatter,
        "The last two columns include that, as every interval of a verdict does"
        f"{without if are_published(repeats) else ''}.",
    ]


def coverage_lines(repeats: pd.DataFrame) -> list[list[str]]:
    """Return a line of texts for each pair of runs, below one for each kind of pair."""
    table = coverage(repeats, published=are_published(repeats))
    lines = []
    for inherited, group in table.groupby("inherited"):
        ranked = group.sort_values("repeats", ascending=False, kind="stable").to_dict("records")
        total = {"run_a": "all", "run_b": "all", "inherited": inherited, **group[COUNTS].sum()}
        lines += [_line(pair) for pair in (total, *ranked)]
    return lines


def _line(pair: Mapping[Any, Any]) -> list[str]:
    counts = [f"{pair[name]} of {pair['repeats']}" for name in COUNTS[1:]]
    kind = INHERITED if pair["inherited"] else SEARCHED
    return [pair["run_a"], pair["run_b"], kind, str(pair["repeats"]), *counts]
