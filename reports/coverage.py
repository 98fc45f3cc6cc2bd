"""How often a second card agrees with the first: sentences and a table (comparison/repeats.py).

first run  second run  configurations  cases  unchanged, by processes alone  unchanged
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from sparsebench.results.comparison.repeats import COUNTS, are_published, coverage
from sparsebench.results.formatting import amount, significant
from sparsebench.results.record import POWER_LIMITED
from sparsebench.results.statistics.between_cards import State, packaged_variation
from sparsebench.results.tables.frame import records

COVERAGE = ["first run", "second run", "configurations", "cases"]
COVERAGE += ["unchanged, by processes alone", "unchanged"]
SEARCHED, INHERITED = "both searched", "the second inherited them"
CONDITIONS = {
    State.FREE: "power or heat limits the boards for at most "
    f"{100 * POWER_LIMITED:g} % of the time",
    State.LIMITED: "it limits a board for longer",
    State.INHERITED: "a run inherits its configurations from another card",
}


def explanation(repeats: pd.DataFrame) -> list[str]:
    """Return sentences that explain the table and the variation between cards."""
    parts = [
        f"{significant(100 * entry.sd, 2)} % if {CONDITIONS[state]} "
        f"({amount(entry.cases, 'case')} in {amount(entry.pairs, 'pair')} of runs, "
        f"{significant(entry.freedom, 2)} degrees of freedom)"
        for state, entry in packaged_variation().items()
    ]
    variation = (
        "Speedups also differ from card to card, from day to day and between versions of the "
        "harness. In the published runs, the standard deviation of this variation is "
        f"{', '.join(parts[:-1])}, and {parts[-1]}."
    )
    if repeats.empty:
        return ["No case was measured on two cards of one kind yet.", variation]
    from_others = "The variation used to test a pair of runs is estimated without that pair."
    return [
        "Each line is a pair of runs that measured the same cases on different cards of one kind. "
        "Both ran the same kernel: their code is the same, or its version differs but the compiled "
        "kernel does not.",
        "A case is unchanged if the 95 % interval of the difference between both speedups holds 0. "
        "By processes alone, this interval is too narrow, because the processes of a run share a "
        "card and a day.",
        variation,
        "Every interval of a verdict includes this variation, and so do those of the last column.",
        *([from_others] if are_published(repeats) else []),
    ]


def coverage_lines(repeats: pd.DataFrame) -> list[list[str]]:
    """Return a line of texts for each pair of runs, below one for each kind of pair."""
    table = coverage(repeats, published=are_published(repeats))
    lines = []
    for inherited, group in table.groupby("inherited"):
        ranked = records(group.sort_values("repeats", ascending=False, kind="stable"))
        total = {"run_a": "all", "run_b": "all", "inherited": inherited, **group[COUNTS].sum()}
        lines += [_line(pair) for pair in (total, *ranked)]
    return lines


def _line(pair: Mapping[Any, Any]) -> list[str]:
    counts = [f"{pair[name]} of {pair['repeats']}" for name in COUNTS[1:]]
    kind = INHERITED if pair["inherited"] else SEARCHED
    return [pair["run_a"], pair["run_b"], kind, str(pair["repeats"]), *counts]
