"""A table of published figures: a description of a few lines, and the one renderer.

    rows \\ columns      64        4096            a cell: the fastest of `ours` in one problem,
    50 %                1.61      1.53 [1.50, 1.55]        over the fastest of `over`
    90 %                3.43      4.85 [4.79, 4.90]

A ratio of two contenders is defined as a speed-up is, with `over` in the place of the baseline:
block by block, process by process (results/statistics.py). A cell that rests on fewer processes
than its run has says so. It has the 95 % interval from FEWEST
processes on, the range below, and in one process the value alone. No digit is shown that its
uncertainty does not support (results/formatting.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

from sparsebench.errors import ResultError
from sparsebench.reports.published._runs import Published
from sparsebench.results.analysis import uncertainty
from sparsebench.results.formatting import amount, interval, rounded
from sparsebench.results.statistics import Blocks, ratio_over

CONTENDER = ("format", "kernel", "label", "options")
PROBLEM = ["run", "problem_id", "scope", "cache"]
SAID = ["op", "dtype", "pattern", "m", "shape", "asked", "block", "active", "skew", "scope"]
WORDS = {"m": "tokens", "shape": "n × k", "asked": "sparsity", "active": "units on"}
SILENT = {
    "scope": "kernel",
    "skew": "iid",
    "asked": "0 %",
    "pattern": "dense",
}  # what every reader expects


@dataclass(frozen=True)
class Table:
    """Figures by two or more columns of the cases.

    ours, over   pandas queries for contenders; `over` is the run's baseline where it is empty
    where        a query for the problems
    rows         columns of the cases that name a line;  columns  those that name a column, of which
                 an empty tuple makes a line of counts: problems, ahead, mean, least and most
    value        the ratio, or the time of `ours` in µs
    names        what stands in place of a value of rows or columns

    Where several runs have a problem, the run named first stands for all. A kernel of `over` that
    has no time in some of the problems is named in the caption.
    """

    name: str
    title: str
    runs: tuple[str, ...]
    ours: str
    rows: tuple[str, ...]
    columns: tuple[str, ...] = ()
    where: str = ""
    over: str = ""
    against: str = ""  # names `over` for a reader
    value: Literal["speedup", "us"] = "speedup"
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A ratio with its interval or range; both ends are NaN where one process gave it."""

    value: float
    low: float
    high: float
    uncertainty: float = np.nan

    def __str__(self) -> str:
        """Write it as `4.85 [4.79, 4.90]`."""
        value = rounded(self.value, self.uncertainty)
        if np.isnan(self.low):
            return value
        return f"{value} [{interval(self.low, self.high, self.uncertainty)}]"


def markdown(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    header = list(header)
    table = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def matched(table: Table, runs: Mapping[str, Published]) -> pd.DataFrame:
    """Return a line a problem: the fastest of `ours`, with its `figure` and its `opponent`.

    `fewer` is the number of processes that the figure rests on, or 0 where it is that of the run.

    Where rows or columns name contenders it is a line for each of those.
    """
    lacking = [name for name in table.runs if name not in runs]
    if lacking:
        raise ResultError(f"table {table.name}: expected a published run, found no {lacking[0]}")
    cases = _first_of_each([runs[name].cases for name in table.runs])
    raced = cases[(cases.status == "ok") & cases.speedup.notna() & ~cases.twin.astype(bool)]
    raced = raced.query(table.where) if table.where else raced
    apart = [name for name in (*table.rows, *table.columns) if name in CONTENDER]
    ours = fastest(raced.query(table.ours), apart)
    if ours.empty:
        raise ResultError(f"table {table.name}: expected cases of {table.ours}, found none")
    if table.value == "us":
        apart_us = ours.high_us - ours.median_us, ours.median_us - ours.low_us
        half = pd.concat(apart_us, axis=1).max(axis=1)
        figures = _figures(ours, ours.median_us, ours.low_us, ours.high_us, half)
        return ours.assign(figure=figures, opponent="", fewer=_fewer(ours, runs))
    if not table.over:
        ends = ours.speedup, ours.speedup_low, ours.speedup_high
        figures = _figures(ours, *ends, ours.uncertainty)
        return ours.assign(figure=figures, opponent=ours.baseline_label, fewer=_fewer(ours, runs))
    theirs = fastest(raced.query(table.over))[[*PROBLEM, "label", "blocks"]]
    both = ours.merge(theirs, on=PROBLEM, suffixes=("", "_over"), validate="many_to_one")
    found = pd.DataFrame(
        [_ratio(*pair) for pair in _pairs(both)], both.index, ["ratio", "low", "high"]
    )
    ends = found.ratio, found.low, found.high
    figures = _figures(both, *ends, uncertainty(*ends, both.floor, both.processes))
    both = both.assign(processes=[len(a.keys() & b.keys()) for a, b in _pairs(both)])
    return both.assign(figure=figures, opponent=both.label_over, fewer=_fewer(both, runs))


def _first_of_each(runs: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Join runs; where several have a problem, the run named first stands for all."""
    cases = pd.concat(runs, ignore_index=True)
    first = cases.groupby(PROBLEM[1:], sort=False).run.transform("first")
    return cases[cases.run == first]


def _pairs(both: pd.DataFrame) -> "zip[tuple[Blocks, Blocks]]":
    return zip(both.blocks, both.blocks_over, strict=True)


def _fewer(found: pd.DataFrame, runs: Mapping[str, Published]) -> list[int]:
    whole = [runs[name].processes for name in found.run]
    return [n if n < of else 0 for n, of in zip(found.processes, whole, strict=True)]


def fastest(cases: pd.DataFrame, apart: Sequence[str] = ()) -> pd.DataFrame:
    """Keep of each problem, and of each value of `apart`, the case of the largest speed-up."""
    ranked = cases.sort_values(["speedup", "label"], ascending=[False, True], kind="stable")
    return ranked.drop_duplicates([*PROBLEM, *apart])


def rendered(table: Table, runs: Mapping[str, Published]) -> str:
    """Return a table's title, what all its figures share, and the table, in Markdown."""
    found = matched(table, runs)
    body = _grid(table, found) if table.columns else _counts(table, found)
    return "\n\n".join([f"**{table.title}.** {_shared(table, found, runs)}", body])


def _figures(
    cases: pd.DataFrame, value: pd.Series, low: pd.Series, high: pd.Series, half: pd.Series
) -> pd.Series:
    one = cases.processes < 2
    lines = zip(value, low.mask(one), high.mask(one), half, strict=True)
    return pd.Series([Figure(*line) for line in lines], cases.index, dtype=object)


def _ratio(ours: Blocks, theirs: Blocks) -> tuple[float, float, float]:
    found = ratio_over(ours, theirs)
    return (found.value, found.low, found.high) if found else (np.nan, np.nan, np.nan)


def _grid(table: Table, found: pd.DataFrame) -> str:
    """Return a line a row; where kernels differ, the commonest of a line and those beside it."""
    told = {"kernel", "label"} & {*table.rows, *table.columns}
    several = not told and found.kernel.nunique() > 1
    columns = _ordered(found, table.columns)[list(table.columns)].drop_duplicates()
    keys = list(columns.itertuples(index=False, name=None))
    lines = []
    for row, group in _ordered(found, table.rows).groupby(list(table.rows), sort=False):
        usual = group.kernel.mode().iloc[0]
        cells: dict[tuple[Any, ...], str] = {}
        for line in group.to_dict("records"):
            column = tuple(line[name] for name in table.columns)
            if column in cells:
                raise ResultError(f"table {table.name}: expected one problem at {row} {column}")
            other = f"`{line['kernel']}`" if several and line["kernel"] != usual else ""
            rests = f" ({line['fewer']} processes)" if line["fewer"] else ""
            figure = f"{line['figure']}{rests}"
            cells[column] = f"{figure} {'dense' if line['dense'] else other}".rstrip()
        kernel = [f"`{usual}`"] if several else []
        lines.append([_value(table, row), *kernel, *(cells.get(key, "") for key in keys)])
    kernel = ["kernel"] if several else []
    across = [_value(table, key) for key in keys]
    return markdown([_words(table, table.rows), *kernel, *across], lines)


def _counts(table: Table, found: pd.DataFrame) -> str:
    lines = []
    for key, group in _ordered(found, table.rows).groupby(list(table.rows), sort=False):
        values = np.array([figure.value for figure in group.figure])
        ranked = sorted(group.figure, key=lambda figure: figure.value)
        parts = np.array([figure.uncertainty / figure.value for figure in ranked])
        mean = float(np.exp(np.log(values).mean()))
        ends = [rounded(end.value, end.uncertainty) for end in (ranked[0], ranked[-1])]
        counted = str(len(values)), str((values > 1).sum()), rounded(mean, mean * parts.mean())
        lines.append([_value(table, key), *counted, *ends])
    names = ["problems", "ahead in", "geometric mean", "least", "most"]
    return markdown([_words(table, table.rows), *names], lines)


def _ordered(found: pd.DataFrame, names: tuple[str, ...]) -> pd.DataFrame:
    """Sort by columns, numbers and texts that begin with one by their size."""

    def key(column: pd.Series) -> pd.Series:
        texts = column.astype(str)
        if not texts.str.match(r"(\w+=)?\d").all():
            return column
        numbers = texts.str.findall(r"[\d.]+")
        return numbers.map(lambda found: sum(float(n) * 1e-8**i for i, n in enumerate(found)))

    return found.sort_values(list(names), key=key, kind="stable") if names else found


def _words(table: Table, names: tuple[str, ...]) -> str:
    words = ", ".join(WORDS.get(name, name) for name in names)
    across = ", ".join(WORDS.get(name, name) for name in table.columns)
    return f"{words} \\ {across}" if across else words


def _value(table: Table, values: tuple[Any, ...]) -> str:
    plain = [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
    return ", ".join(table.names.get(value, value) for value in plain)


def _shared(table: Table, found: pd.DataFrame, runs: Mapping[str, Published]) -> str:
    """Say what all figures of a table have in common: problem, kernel, baseline, GPU, run."""
    said = []
    for name in SAID:
        values: list[Any] = list(found[name].dropna().unique()) if name in found else []
        if name in (*table.rows, *table.columns) or len(values) != 1:
            continue
        if SILENT.get(name) != str(values[0]) and (name, str(values[0])) != ("block", "1"):
            value = f"{values[0]:g}" if isinstance(values[0], float) else str(values[0])
            word = {"m": "tokens", "active": "units on"}.get(name, "")
            said.append(f"{word} {value}".strip() if word else f"{_prefix(name)}{value}")
    kernels = found.kernel.unique()
    if len(kernels) == 1:
        said.append(f"`{kernels[0]}`")
    if table.value == "us":
        said.append("µs")
    else:
        said.append(f"over {table.against or ', '.join(sorted(found.opponent.unique()))}")
    for run in (runs[name] for name in table.runs if name in set(found.run)):
        count = amount(run.processes, "process")
        said.append(f"[{run.name}](/{run.home}), {run.gpu}, {count}, a {run.weight}")
    return "; ".join([*said, *_missed(table, found, runs)]) + "."


def _missed(table: Table, found: pd.DataFrame, runs: Mapping[str, Published]) -> list[str]:
    """Name the sparse kernels of `over` that have no time in these problems, or in some of them."""
    if not table.over:
        return []
    cases = _first_of_each([runs[name].cases for name in table.runs])
    here = cases.merge(found[PROBLEM].drop_duplicates(), on=PROBLEM).query(table.over)
    here = here[here.format != "dense"]
    ran = (here.status == "ok").groupby([here.kernel, here.problem_id]).any().groupby("kernel")
    never, always = (~ran.any(), ran.all())
    names = {"no times of": never, "only some times of": ~never & ~always}
    listed = {how: ", ".join(f"`{name}`" for name in of[of].index) for how, of in names.items()}
    return [f"{how} {listed[how]}" for how in listed if listed[how]]


def _prefix(name: str) -> str:
    return {"block": "blocks of ", "asked": "sparsity ", "shape": "n × k = "}.get(name, "")
