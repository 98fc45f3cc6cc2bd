"""Grids of contenders by problems, and findings: what a row of a grid shows.

                   50 %     80 %     90 %      a cell: the fastest case of the row in each problem
    blocks of 128  1.71×    3.66×    5.52×     of the column, over the fastest dense contender
    CSR            0.02×    0.05×    0.08×

    lines ─> grid      rows by the column `row` of the lines, the one with the largest gain first
          ─> findings  blocks of 128: faster from 50 % to 90 % sparsity, up to 5.52× [5.46, 5.58]
          ─> views     a grid for every choice of the fields that no axis shows

Lines are cases with gains and shapes (contests.py), of one run or of the cards of several
(reports/site/cards.py). Every page shows such grids, and says such findings of them
(reports/grids.py). Only measured columns are named, and nothing is claimed between two of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

from sparsebench.results.formatting import blocks_text, join_words, percent, plain
from sparsebench.results.statistics.outcome import Outcome, outcome
from sparsebench.results.tables.cases import CONTEST
from sparsebench.results.tables.contests import sort_values_of, with_shapes
from sparsebench.results.tables.frame import fields, records

ACROSS = ("level", "m", "shape", "block")  # x is the first of these that is swept
NO_CHOICE = ("n", "k", "active", "sparsity", "block", "seed", "m")  # fields of rows and columns
EVERY = "all"  # the choice of all shapes

Case = Mapping[Any, Any]
"""A line of `contests.with_shapes`."""


def outcome_of(case: Case) -> Outcome:
    """Return the outcome of a case against the fastest dense contender of its contest."""
    if pd.isna(case["gain"]):
        return Outcome.NOT_MEASURED
    if case["decided"]:
        return Outcome.FASTER if case["gain"] > 1 else Outcome.SLOWER
    is_equal = outcome(case["low"], case["high"]) is Outcome.EQUAL
    return Outcome.EQUAL if is_equal else Outcome.NOT_SETTLED


@dataclass(frozen=True)
class Cell:
    """The fastest case of a row in each problem of a column, the largest gain first."""

    cases: Sequence[Case]

    @property
    def best(self) -> Case:
        return self.cases[0]

    @cached_property
    def outcomes(self) -> set[Outcome]:
        return set(map(outcome_of, self.cases))

    @property
    def decided(self) -> bool:
        return all(case["decided"] for case in self.cases)


@dataclass(frozen=True)
class Grid:
    """Cells by row and by the value of the field `x`; `units` is what a level is a share of."""

    x: str
    columns: Sequence[Any]
    rows: Mapping[str, Mapping[Any, Cell]]
    units: str = ""

    @property
    def cases(self) -> Iterator[Case]:
        """Yield every case, row by row."""
        return (case for cells in self.rows.values() for c in cells.values() for case in c.cases)


@dataclass(frozen=True)
class Finding:
    """What a contender shows against dense.

    contender  a row of a grid, or a kernel with its options
    group      the columns with this outcome, or the problem; "" for some problems of no column
    outcome    in the group
    best       the case with the largest gain in it
    details    further facts in words, if the finding is of a single case
    """

    contender: str
    group: str
    outcome: Outcome
    best: Case
    details: Sequence[str] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return the finding for a script: gain, low and high are null if they are unknown.

        `weights` are those that the baseline multiplies, `same_zeros` the gain over pruned ones.
        """
        ends = {n: None if pd.isna(self.best[n]) else self.best[n] for n in ("gain", "low", "high")}
        facts = {"contender": self.contender, "group": self.group, "outcome": self.outcome, **ends}
        baseline = {"baseline": self.best["dense_name"], "case": self.best["case_id"]}
        zeros = self.best["zeros_gain"]
        baseline |= {"weights": self.best["over"], "same_zeros": None if pd.isna(zeros) else zeros}
        return facts | baseline | {"details": [*self.details]}


@dataclass(frozen=True)
class View:
    """One choice of the fields, its lines, and the field `x` along its columns."""

    choice: dict[str, str]
    x: str
    lines: pd.DataFrame

    @cached_property
    def grid(self) -> Grid:
        return grid(self.lines, self.x)


def grid(lines: pd.DataFrame, x: str, row: str = "row") -> Grid:
    """Return the grid of the sparse cases among these lines, with a row per value of `row`."""
    sparse = lines[(lines.side != "dense") & lines[x].notna()]
    fastest = sparse.assign(rate=-sparse.median_us)
    fastest = fastest.sort_values(["gain", "rate"], ascending=False, kind="stable")
    contest = ["place", *(name for name in ("run",) if name in lines)]
    cases: dict[str, dict[Any, list[Case]]] = {}
    for case in records(fastest.drop_duplicates([row, *contest])):
        cases.setdefault(str(case[row]), {}).setdefault(case[x], []).append(case)
    columns = sort_values_of(sparse[x])
    rows = {
        title: {at: Cell(of_row[at]) for at in columns if at in of_row}
        for title, of_row in cases.items()
    }
    units = " of units off" if len(sparse) and bool(sparse.of_units.all()) else " sparsity"
    return Grid(x, columns, rows, units if x == "level" else "")


def findings(grid: Grid) -> list[Finding]:
    """Return what each row of a grid shows."""
    return [_finding(title, cells, grid) for title, cells in grid.rows.items()]


def _finding(contender: str, cells: Mapping[Any, Cell], grid: Grid) -> Finding:
    """Return where a row is faster in all problems of a column, or else what all columns share."""
    faster = [at for at, cell in cells.items() if cell.outcomes == {Outcome.FASTER}]
    shared = faster or [*cells]
    outcomes = set[Outcome]().union(*(cells[at].outcomes for at in shared))
    best = max((cells[at].best for at in shared), key=lambda case: _rank(case["gain"]))
    group = columns_text(grid, shared)
    if len(outcomes) == 1:
        return Finding(contender, group, outcomes.pop(), best)
    is_faster = Outcome.FASTER in outcomes  # in some problems of a column, but not in all
    return Finding(contender, "", Outcome.FASTER if is_faster else Outcome.NOT_SETTLED, best)


def _rank(gain: float) -> float:
    return -1.0 if pd.isna(gain) else float(gain)


def column_text(x: str, value: Any) -> str:
    """Write the head of a column: `90 %`, `16`, `4096 × 4096`."""
    writers: dict[str, Callable[[Any], str]] = {"level": percent, "block": blocks_text}
    return writers.get(x, plain)(value)


def columns_text(grid: Grid, values: Sequence[Any]) -> str:
    """Write columns of a grid: `from 50 % to 95 % sparsity`, `at m 16`, `at every n × k`."""
    every = list(grid.columns)
    name = {"shape": "n × k ", "level": ""}.get(grid.x, f"{grid.x} ")
    texts = [column_text(grid.x, value) for value in values]
    first = every.index(values[0])
    is_range = grid.x in ("level", "m") and every[first : first + len(values)] == list(values)
    if len(texts) > 1 and is_range:
        return f"from {name}{texts[0]} to {texts[-1]}{grid.units}"
    if len(texts) == len(every) > 1:
        return f"at every {name.strip()}"
    return f"at {name}{join_words(texts)}{grid.units}"


def views(timed: pd.DataFrame) -> list[View]:
    """Return the views of cases with gains for all choices of fields, the first to show in front.

    There is none if no case has a time.
    """
    if timed.empty:
        return []
    lines = with_shapes(timed)
    contests = lines.drop_duplicates(CONTEST)
    names = ["op", "m", "shape", *(n for n in fields(lines) if n not in NO_CHOICE), *CONTEST[1:]]
    x = _across(contests, names)
    varying = [n for n in names if n != x and contests[n].nunique(dropna=False) > 1]
    counts = contests.groupby("shape")[varying].nunique(dropna=False).max()
    of_shape = contests["shape"].nunique() > 1  # which may determine other fields
    fixed = [n for n in varying if n in ("op", "m") or counts[n] > 1 or not of_shape]
    fixed = [n for n in fixed if n != "shape"]
    views = []
    for key, group in lines.groupby(fixed, sort=False, dropna=False) if fixed else [((), lines)]:
        choice = dict(zip(fixed, map(plain, key), strict=True))
        shapes = sort_values_of(group["shape"]) if "shape" in varying else []
        if len(shapes) != 1:
            views.append(View(choice | ({"shape": EVERY} if shapes else {}), x, group))
        views += [
            View(choice | {"shape": shape}, x, group[group["shape"] == shape]) for shape in shapes
        ]
    return sorted(views, key=_order)


def _across(contests: pd.DataFrame, names: Sequence[str]) -> str:
    """Return the field along x: the first of ACROSS that varies while every other one is fixed."""
    for name in ACROSS:
        others = [n for n in names if n not in (name, "block")]
        if contests.groupby(others, dropna=False)[name].nunique().max() > 1:
            return name
    return "level" if contests.level.notna().any() else "m"


def _order(view: View) -> tuple[bool, bool, bool, bool, int]:
    """Order views: the forward product, kernel time with a cold cache, bf16, most problems."""
    usual = {"op": "linear", "scope": "kernel", "cache": "cold", "dtype": "bf16"}
    op, scope, cache, dtype = (view.choice.get(n, value) != value for n, value in usual.items())
    return op, scope, cache, dtype, -view.lines.place.nunique()
