"""What users get beside the fastest named kernel of the format, in each contest.

users    a case of the contender `default`, which chooses as a layer does
rival    the fastest case of the same format and params that a suite names
within   the time of `users` is at most 1 + SHARE times that of `rival`, plus SPARE_US
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from sparsebench.results.formatting import significant
from sparsebench.results.tables.cases import CONTEST
from sparsebench.results.tables.families import DEFAULT, OF_ACTIVATIONS
from sparsebench.results.tables.frame import records

SHARE, SPARE_US = 0.03, 0.5  # fraction of the fastest kernel's time, and the scatter of a launch

TimedCase = Mapping[Any, Any]
"""A line of `timed` (results/tables/analysis.py)."""


def pairs(timed: pd.DataFrame) -> list[tuple[TimedCase, TimedCase]]:
    """Return `users` and `rival` of each format and contest that has both."""
    contests = timed.groupby(CONTEST, sort=False, dropna=False)
    return [pair for _, contest in contests for pair in _of_contest(records(contest))]


def is_within(users: TimedCase, rival: TimedCase) -> bool:
    return float(users["median_us"]) <= (1 + SHARE) * float(rival["median_us"]) + SPARE_US


def sentence(timed: pd.DataFrame) -> str:
    """Say how often layers choose a slower kernel, and the worst case; "" if they never do."""
    every = [] if timed.empty else pairs(timed)
    ratios = [
        float(users["median_us"]) / float(rival["median_us"])
        for users, rival in every
        if not is_within(users, rival)
    ]
    if not ratios:
        return ""
    return (
        f"In {len(ratios)} of {len(every)} cases users get a slower kernel by default, which takes "
        f"up to {significant(max(ratios))} times as long as the fastest named kernel of the format."
    )


def _of_contest(contest: list[dict[str, Any]]) -> Iterator[tuple[TimedCase, TimedCase]]:
    named_kernels = [case for case in contest if case["kernel"] != DEFAULT]
    sparse = [case for case in named_kernels if case["side"] != "dense"]  # also of a portfolio
    for users in contest:
        rivals = [case for case in sparse if _kind(case) == _kind(users)]
        if users["kernel"] == DEFAULT and users["format"] != "dense" and rivals:
            yield users, min(rivals, key=lambda case: float(case["median_us"]))


def _kind(case: TimedCase) -> str:
    """Return what rivals share: the format and its params, or that they store activations."""
    stores_activations = case["format"] in OF_ACTIVATIONS
    return "activations" if stores_activations else f"{case['format']} {case['params']}"
