"""Detect badly tuned contenders, ours included.

A contender with `tuned=True` is in doubt if it is slower than with `tuned=False` in one contest.
The times that a search measured (Row.candidates) are not used: in a search, short calls measure 5 %
faster than in a contest, and a contender with several GEMMs runs a separate search for each.

A doubt is not an error: the times are real. It means that another kernel's speedup over this
contender may be due to a bad choice of configuration.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from sparsebench.results.record import Status
from sparsebench.results.tables.frame import KEYS, fields, records

SLOWER = 1.05  # ratio to the default's time; most A/A pairs within a process differ by less
SEARCHES = r"\b(?:tuned|search)=(\S+)"  # options that turn tuning on or off


def doubts(table: pd.DataFrame) -> list[str]:
    """Return a line for each tuned contender of a frame that is slower than its default."""
    recipe = ["problem_id", "scope", "cache", "format", "kernel", "params", "rest"]
    cases = _cases(table).sort_values("search", ascending=False, kind="stable")
    # A contender without the option is tuned if a rival has False, and not if one has True.
    tuned = cases[cases.search != "False"].drop_duplicates(recipe).sort_index()
    default = cases[cases.search != "True"].drop_duplicates(recipe)
    pairs = tuned.merge(default[[*recipe, "us", "label"]], on=recipe, suffixes=("", "_default"))
    return [
        f"{_text(line, fields(table))}: expected at most {line['us_default']:.1f} µs, as "
        f"{line['label_default']}, found {line['us']:.1f} µs"
        for line in records(pairs[pairs.us > SLOWER * pairs.us_default])
    ]


def _cases(table: pd.DataFrame) -> pd.DataFrame:
    """Return the ok cases of a frame in each scope and cache state, without twins.

    us      the median over the processes
    search  the value of one of SEARCHES ("" if there is none), and `rest` the other options
    """
    right = table[(table.status == Status.OK) & ~table.twin.astype(bool)]
    us = right.groupby(KEYS).median_us.transform("median")
    cases = right.assign(us=us).drop_duplicates(KEYS)
    search = cases.options.str.extract(SEARCHES)[0].fillna("")
    rest = cases.options.str.replace(SEARCHES, "", regex=True).str.split().str.join(" ")
    return cases.assign(search=search, rest=rest)


def _text(line: Mapping[Any, Any], names: Iterable[str]) -> str:
    """Write the op, the fields, the contender, the scope and the cache state of a case."""
    values = " ".join(f"{name}={line[name]}" for name in names if not pd.isna(line[name]))
    return f"{line['op']} {values} {line['label']} ({line['scope']}, {line['cache']})"
