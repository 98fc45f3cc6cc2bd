"""The contract of every file in reports/figures/, and how figures split a run into panels.

    TITLE = "Stored bytes"                      the heading
    ORDER = 50                                  the place on the page: smaller comes first
    def draw(frames: Frames) -> Markup: ...     HTML that loads nothing; NOTHING if none applies

The report finds a figure by its file name.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._html import folded
from sparsebench.reports.figures._svg import looks
from sparsebench.reports.figures._verdict import clear, undecided
from sparsebench.results.contests import with_gains
from sparsebench.results.formatting import percent, plain
from sparsebench.results.frame import fields
from sparsebench.results.model_files import Pruning
from sparsebench.results.noise import Noise
from sparsebench.results.provenance import device_name
from sparsebench.results.store import Run

NOTHING = Markup("")
MEASURE = ["scope", "cache"]
SCOPES = {
    "kernel": "kernel time",
    "op": "as called from Python, host cost included",
    "chain": "time of a layer among others in one graph",
}


@dataclass(frozen=True)
class Frames:
    """What a figure draws from.

    rows     one line per row (results/frame.py)
    cases    one line per case, scope and cache state (results/analysis.py)
    noise    A/A pairs and noise floors (results/noise.py)
    pruning  errors by pruning, if the report was given any (results/model_files.py)
    """

    run: Run
    rows: pd.DataFrame
    cases: pd.DataFrame
    noise: Noise
    pruning: Pruning | None = None

    @property
    def device(self) -> str:
        """Name the GPU or CPU."""
        return device_name(self.run.environment)

    @cached_property
    def raced(self) -> pd.DataFrame:
        """Return the cases with a time, without twins, as `contests.with_gains` returns them.

        `clear`: clearly faster than the baseline. `undecided`: not told apart from it.
        """
        cases = with_gains(self.cases)
        return cases.assign(clear=clear(cases), undecided=undecided(cases))

    def series_of(self, cases: pd.DataFrame) -> dict[str, int]:
        """Return the contenders of these cases with their numbers, the same on the whole page."""
        drawn = set(cases.label)
        return {label: number for label, number in self.series.items() if label in drawn}

    @cached_property
    def series(self) -> dict[str, int]:
        """Return the looks of all contenders that ran, except the baseline: one for a kernel."""
        others = self.raced[~self.raced.label.isin(self.cases.baseline_label.dropna().mode())]
        first = others.drop_duplicates("label")
        named = zip(first.label, first.kernel, first.options, first.params, strict=True)
        return {
            label: looks(kernel, f"{options}{params}") for label, kernel, options, params in named
        }


def swept(cases: pd.DataFrame) -> str:
    """Return the column for x: the level of sparsity, or a numeric field with more values.

    It is n where the level follows from the shape.
    """
    others = [name for name in fields(cases) if name not in ("sparsity", "block", "n", "k")]
    numeric = [name for name in others if pd.api.types.is_numeric_dtype(cases[name])]
    found = max(["level", *numeric], key=lambda name: cases[name].round(3).nunique())
    shapes = cases.groupby(["n", "k", "block", "pattern"], dropna=False)["level"]
    follows = found == "level" and shapes.nunique().max() == 1 < cases.n.nunique()
    return "n" if follows else found


def measures(cases: pd.DataFrame) -> list[pd.DataFrame]:
    """Split cases by scope and cache state: kernel time and a cold cache come first."""
    groups = [group for _, group in cases.groupby(MEASURE, sort=False)]
    return sorted(groups, key=lambda g: (g.scope.iloc[0] != "kernel", g.cache.iloc[0] != "cold"))


def each_measure(cases: pd.DataFrame, draw: Callable[[pd.DataFrame], Markup]) -> Markup:
    """Draw the first scope and cache state openly, and each other one folded below it."""
    drawn = [(named(group.iloc[0], MEASURE), draw(group)) for group in measures(cases)]
    shown = [(title, body) for title, body in drawn if body]
    rest = Markup("").join(folded(title, body) for title, body in shown[1:])
    return shown[0][1] + rest if shown else NOTHING


def panels(
    cases: pd.DataFrame, x: str, together: Sequence[str] = ()
) -> tuple[str, list[tuple[str, pd.DataFrame]]]:
    """Split cases into panels, by every field but x and those to keep together.

    Return the values that all cases share, in words; and for each panel its own values and cases.
    """
    names = [*fields(cases), "level", *MEASURE]
    shape = ("k", "level") if x == "n" else ()  # they follow from n
    names = ["op", *(n for n in names if n not in ("sparsity", x, *shape, *together))]
    differ = [name for name in names if cases[name].nunique(dropna=False) > 1]
    same = named(cases.iloc[0], [name for name in names if name not in differ])
    if not differ:
        return same, [("", cases)]
    groups = [group for _, group in cases.groupby(differ, sort=False, dropna=False)]
    groups.sort(key=lambda group: [_sort_key(group[name].iloc[0]) for name in differ])
    return same, [(named(group.iloc[0], differ), group) for group in groups]


def named(line: "pd.Series[Any]", names: Sequence[str]) -> str:
    """Write the fields of a line for a reader: `linear · m 64 · n 4096 · bf16 · block 16`."""
    return " · ".join(_word(name, line[name]) for name in names if not _empty(line[name]))


def ordered(values: "pd.Series[Any]") -> list[Any]:
    """Return the distinct values: numbers by size, blocks by area, other text by name."""
    return sorted(values.unique(), key=_sort_key)


def _word(name: str, value: Any) -> str:
    if name == "level":
        return f"sparsity {percent(value)}"
    if name in MEASURE:
        return SCOPES.get(value, value) if name == "scope" else f"{value} cache"
    return str(value) if name in ("op", "dtype", "pattern", "label") else f"{name} {plain(value)}"


def _empty(value: Any) -> bool:
    return bool(pd.isna(value)) or value == ""


def _sort_key(value: Any) -> tuple[float, str]:
    """Sort numbers by size, blocks by area, other text by name; what is missing comes first."""
    if _empty(value):
        return -1, ""
    if not isinstance(value, str):
        return float(value), ""
    block = re.fullmatch(r"(\d+)x?(\d*)", value)
    return (float(block[1]) * float(block[2] or block[1]), "") if block else (0, value)
