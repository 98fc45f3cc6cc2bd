"""How often a second card agrees with the first: sentences and two tables (comparison/repeats.py).

stratum                  cases  inside            unchanged, by processes alone  unchanged  p
all                      503    456 of 503, 91 %  ...
first run  second run    cases  inside            unchanged, by processes alone  unchanged
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from sparsebench.results.comparison.repeats import (
    INSIDE,
    TESTS,
    are_published,
    coverage,
    strata,
    with_tests,
)
from sparsebench.results.formatting import amount, join_words, significant
from sparsebench.results.statistics.between_cards import packaged_variation
from sparsebench.results.tables.frame import records

COUNTS = ["cases", "inside", "unchanged, by processes alone", "unchanged"]
STRATA = ["stratum", *COUNTS, "p"]
COVERAGE = ["first run", "second run", *COUNTS]


def explanation(repeats: pd.DataFrame) -> list[str]:
    """Return sentences that explain the tables and the variation between cards."""
    by_class = [
        f"{significant(100 * each.sd, 2)} % ({name}: {amount(each.cases, 'case')} on "
        f"{amount(each.cards, 'card')}, {significant(each.freedom, 2)} degrees of freedom)"
        for name, each in packaged_variation().classes.items()
    ]
    variation = (
        "Speedups also differ from card to card, from day to day and between versions of the "
        "harness. In the published runs, the standard deviation of this variation is "
        f"{join_words(by_class)}. A jackknife over the cards gives the degrees of freedom. Every "
        "interval of a verdict includes this variation. The fewer degrees of freedom the estimate "
        "of a kernel has, the closer the result is to that of all kernels with such times."
    )
    if repeats.empty:
        return ["No case was measured on two cards of one kind yet.", variation]
    of_others = "Each pair of runs is tested with the variation of cases that other cards measured."
    return [
        "The cases below were measured in two runs on different cards of one kind, over dense on "
        "the same zeros. Both runs searched for their configurations and ran the same kernel: "
        "their code is the same, or its version differs but the compiled kernel does not.",
        "A case is inside if the speedup of the second run lies inside the 95 % interval of the "
        f"first. This is expected of about {100 * INSIDE:g} %, because both cards differ from the "
        "mean of all cards. A case is unchanged if the 95 % interval of the difference between "
        "both speedups holds 0. This is expected of 95 %.",
        "By processes alone, intervals are too narrow, because the processes of a run share a "
        "card and a day. " + variation,
        *([of_others] if are_published(repeats) else []),
        f"p is the probability of so few cases inside if {100 * INSIDE:g} % were expected "
        "(binomial test, corrected for the number of strata by Holm's method). The test takes "
        "cases as independent.",
    ]


def coverage_tables(repeats: pd.DataFrame) -> tuple[list[list[str]], list[list[str]]]:
    """Return the lines of both tables as texts: of each stratum, and of each pair of runs."""
    if repeats.empty:
        return [], []
    table = with_tests(repeats, published=are_published(repeats))
    every = {"repeats": len(table), **table[TESTS].sum()}
    by_stratum = [["all", *_shares(every), ""]]
    by_stratum += [
        [line["stratum"], *_shares(line), f"{line['p']:.2f}"] for line in records(strata(table))
    ]
    pairs = coverage(table).sort_values("repeats", ascending=False, kind="stable")
    return by_stratum, [[line["run_a"], line["run_b"], *_counts(line)] for line in records(pairs)]


def _counts(line: Mapping[Any, Any]) -> list[str]:
    return [str(line["repeats"]), *(f"{line[name]} of {line['repeats']}" for name in TESTS)]


def _shares(line: Mapping[Any, Any]) -> list[str]:
    """Return the counts, each of them with its share."""
    cases, *counts = _counts(line)
    shares = [f"{100 * line[name] / line['repeats']:.0f} %" for name in TESTS]
    return [cases, *(f"{count}, {share}" for count, share in zip(counts, shares, strict=True))]
