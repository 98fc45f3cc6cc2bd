"""Cliffs: where fewer tokens take longer than more, in runs of many numbers of tokens.

time │      ●            a cliff: its time is more than LIMIT times the least time
     │  ●──● ╲──●──●     of any larger number of tokens
     └──────────────  m
"""

import pandas as pd

from sparsebench.results.formatting import significant
from sparsebench.results.tables.frame import fields

COUNTS = 12  # numbers of tokens that a run must have
LIMIT = 1.05  # ratio of a cliff
REST = "seed", "sparsity", "m"  # fields in which the cases of a line may differ


def key(cases: pd.DataFrame) -> list[str]:
    """Return the columns that the cases of a line share."""
    return ["op", *(name for name in fields(cases) if name not in REST), "level", "label"]


def ratios(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases that have a case of more tokens, those with the largest ratio first.

    ratio    of the time to the least time of more tokens
    least_us that time, and `more` the largest number of tokens that has it
    """
    parts = []
    for _, group in cases.groupby(key(cases), sort=False, dropna=False):
        line = group.sort_values("m")
        least = line.median_us[::-1].cummin()[::-1].shift(-1)
        more = [line.m[line.median_us == us].max() for us in least]
        parts.append(line.assign(ratio=line.median_us / least, least_us=least, more=more))
    every = pd.concat(parts)
    return every[every.ratio.notna()].sort_values("ratio", ascending=False, kind="stable")


def sentence(cases: pd.DataFrame) -> str:
    """Count the cliffs of the cases of one measure; "" if they have few numbers of tokens."""
    if cases.empty or cases.m.nunique() < COUNTS:
        return ""
    every = ratios(cases)
    count = f"{(every.ratio > LIMIT).sum()} of {len(every)} cases take more than {LIMIT} times as "
    count += "long as a case of more tokens"
    return f"{count}; the largest ratio is {significant(every.ratio.iloc[0])}."
