"""The contract of every file in reports/figures/, and the panels that figures split a run into.

    TITLE = "Roofline"                          the heading
    ORDER = 66                                  the place on the page: smaller comes first
    def draw(frames: Frames) -> Markup: ...     HTML that loads nothing; NOTHING if none applies

The report finds a figure by its file name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._verdict import clear, is_undecided
from sparsebench.results.formatting import percent
from sparsebench.results.model_files import Pruning
from sparsebench.results.problem_names import field_text
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.contests import size_key
from sparsebench.results.tables.frame import fields

NOTHING = Markup("")
MEASURE = ["scope", "cache"]
SILENT = {("block", "1"), ("level", "0.0"), ("pattern", "dense"), ("skew", "iid")}
SCOPES = {
    "kernel": "kernel time",
    "op": "as called from Python, host cost included",
    "chain": "time of a layer inside a chain, in one graph",
}


@dataclass(frozen=True)
class Frames(Analysis):
    """The data of a figure: the tables of a run (results/tables/analysis.py).

    pruning  errors of pruning, if the report got any (results/model_files.py)
    """

    pruning: Pruning | None = None

    @cached_property
    def raced(self) -> pd.DataFrame:
        """Return `timed` with more columns.

        `clear`: clearly faster than the baseline. `undecided`: perhaps as fast as the baseline.
        """
        return self.timed.assign(clear=clear(self.timed), undecided=is_undecided(self.timed))

    @cached_property
    def first(self) -> pd.DataFrame:
        """Return `raced` at one scope and cache state: kernel time and a cold cache if measured.

        The table of every case has the others.
        """
        groups = [group for _, group in self.raced.groupby(MEASURE, sort=False)]
        usual = ("kernel", "cold")
        return max(
            groups,
            key=lambda group: [*map(str.__eq__, group[MEASURE].iloc[0], usual)],
            default=self.raced,
        )

    @property
    def contenders(self) -> pd.DataFrame:
        """Return the cases of `first`, without those of the usual baseline."""
        return self.first[~self.first.label.isin(self.cases.baseline_label.dropna().mode())]


def swept(cases: pd.DataFrame) -> str:
    """Return the column for x: the sparsity, or a numeric field with more values.

    It is n if the sparsity follows from the shape.
    """
    others = [name for name in fields(cases) if name not in ("sparsity", "block", "n", "k")]
    numeric = [name for name in others if pd.api.types.is_numeric_dtype(cases[name])]
    column = max(["level", *numeric], key=lambda name: cases[name].round(3).nunique())
    shapes = cases.groupby(["n", "k", "block", "pattern"], dropna=False)["level"]
    follows = column == "level" and shapes.nunique().max() == 1 < cases.n.nunique()
    return "n" if follows else column


def panels(
    cases: pd.DataFrame, x: str, together: Sequence[str] = ()
) -> tuple[str, list[tuple[str, pd.DataFrame]]]:
    """Split cases into panels by every field except x and those to keep `together`.

    Return the values that all cases share in words, and the title and the cases of each panel.
    """
    names = [*fields(cases), "level", *MEASURE]
    shape = ("k", "level") if x == "n" else ()  # they follow from n
    names = ["op", *(n for n in names if n not in ("sparsity", x, *shape, *together))]
    differ = [name for name in names if cases[name].nunique(dropna=False) > 1]
    same = describe_line(cases.iloc[0], [name for name in names if name not in differ])
    if not differ:
        return same, [("", cases)]
    groups = [group for _, group in cases.groupby(differ, sort=False, dropna=False)]
    groups.sort(key=lambda group: [_sort_key(group[name].iloc[0]) for name in differ])
    return same, [(describe_line(group.iloc[0], differ), group) for group in groups]


def describe_line(line: "pd.Series[Any]", names: Sequence[str]) -> str:
    """Write the fields of a line for a reader: `linear · m 64 · n 4096 · bf16 · 16 × 16 blocks`.

    Values that every plain problem has (SILENT) are left out.
    """
    values = {name: line[name] for name in names if not _empty(line[name])}
    return " · ".join(
        _word(*each) for each in values.items() if (each[0], str(each[1])) not in SILENT
    )


def _word(name: str, value: Any) -> str:
    if name == "level":
        return f"sparsity {percent(value)}"
    if name in MEASURE:
        return SCOPES.get(value, value) if name == "scope" else f"{value} cache"
    return str(value) if name == "label" else field_text(name, value)


def _empty(value: Any) -> bool:
    return bool(pd.isna(value)) or value == ""


def _sort_key(value: Any) -> tuple[float, float, str]:
    """Sort as `contests.size_key` does; missing values come first."""
    return (-1, 0, "") if _empty(value) else size_key(value)
