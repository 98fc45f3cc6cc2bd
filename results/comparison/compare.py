"""One model of a cell that two sides measured, for `compare`, `reproduce`, surveys and coverage.

A cell is a case in one scope and cache state. Cells are joined on these; equal ids of cases have
equal operands.

    time       time of a / time of b; above 1, b takes less time. `word` is its outcome.
    ratio      gain of b / gain of a, each over the baseline of the same run; `gain` is its outcome

If only one side has a baseline with unpruned weights, both are compared on the same zeros.

The logarithm of each is a difference of two means over processes, because the two sides share no
contest. Half of its 95 % interval is

    h = sqrt( (t s)^2 + between a^2 + between b^2 )    s, t: Welch 1947; 6 processes or more
    h = the larger of that Welch half and tolerance    fewer processes

`between` is the variation between cards (between_cards.py). It counts if no card ran the case on
both sides. Faster and slower also need q <= 5 % over all cells.

    tolerance = apart x sqrt(1 / processes of a + 1 / processes of b)

`apart` holds for single processes, by the length of the call: APART, or the noise floors of the two
runs if they are larger. Equal speedups exceed it in 0 to 3 % of cells (harness/NOTES.md).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy

from sparsebench.errors import ResultError
from sparsebench.results.comparison.sides import Side
from sparsebench.results.record import Status
from sparsebench.results.statistics.outcome import Outcome, among_many
from sparsebench.results.statistics.ratio import FEWEST, q_values, welch
from sparsebench.results.tables.analysis import has_unpruned
from sparsebench.results.tables.frame import KEYS, fields, records
from sparsebench.results.tables.noise import classes

# The 99th percentile of |d_p - mean|, rounded up: d_p is a log speedup in process p, from 1293
# cases of published runs with 3 or 8 processes on an NVIDIA H200, the worse of the two
# (harness/NOTES.md).
APART = {"below 8 µs": 0.08, "8 to 20 µs": 0.07, "20 to 100 µs": 0.07, "above 100 µs": 0.05}
OF_FLOOR = 1.31  # a normal distribution's 99th percentile over its 95th, of absolute values
NORMAL = 1.96  # 95 % of a normal distribution

TIME = ["time", "time_low", "time_high"]
GAIN = ["ratio", "low", "high"]
SIDES = ["status", "median_us", "low_us", "high_us", "interval"]
SIDES += ["speedup", "speedup_low", "speedup_high", "uncertainty", "baseline_label"]
SIDES += ["processes", "outcome", "floor", "between", "of_bound", "detail", "choice", "mark"]
SIDES += ["speedups", "run", "times", "codes", "cards", "searched"]

Line = Mapping[Any, Any]


def compare(a: Side, b: Side) -> pd.DataFrame:
    """Return one line per cell of both sides, with the columns of this module.

    Columns of one side end in _a or _b. Raises ResultError if the sides share no case, if the
    operands of a problem differ, or if no case has a time on either.
    """
    if len({any(map(has_unpruned, side.runs)) for side in (a, b)}) > 1:
        a, b = a.on_same_zeros, b.on_same_zeros
    shared = ["problem_id", "op", *fields(a.cases), "source", "seed", "level", "format", "kernel"]
    shared += ["label", "baseline", "twin"]
    cells = a.cases[[*KEYS, *shared, *SIDES]].merge(
        b.cases[[*KEYS, *SIDES]], on=KEYS, suffixes=("_a", "_b"), validate="one_to_one"
    )
    if cells.empty:
        counts = f"{len(a.cases)} and {len(b.cases)} with none in common"
        raise ResultError(
            f"{a.paths} and {b.paths}: expected a case that both have, found {counts}"
        )
    _require_equal_operands(a, b)
    timed = [cells[f"status_{end}"].eq(Status.OK) for end in "ab"]
    if not (timed[0] | timed[1]).any():
        expected = "expected a case with a time on either side"
        raise ResultError(f"{a.paths} and {b.paths}: {expected}, found none")
    cells["tolerance"] = _tolerance_of_looks(cells)
    cells["is_baseline"] = cells.label == cells.baseline_label_a
    cells["by_speedup"] = (
        ~cells.is_baseline
        & cells[["speedup_a", "speedup_b"]].notna().all(axis=1)
        & (cells.baseline_label_a == cells.baseline_label_b)
    )
    lines = records(cells)
    times = [ratio_of_means(line["times_b"], line["times_a"], line) for line in lines]
    gains = [
        ratio_of_means(np.log(line["speedups_a"]), np.log(line["speedups_b"]), line)
        if line["by_speedup"]
        else (np.nan,) * 4
        for line in lines
    ]
    for names, word, tests in ((TIME, "word", times), (GAIN, "gain", gains)):
        table = pd.DataFrame(tests, cells.index, [*GAIN, "p"], dtype="float64")
        cells[names] = table[GAIN]
        cells[word] = outcomes(table)
    cells["uncertainty"] = np.maximum(cells.ratio - cells.low, cells.high - cells.ratio)
    cells.loc[timed[0] != timed[1], "word"] = str(Outcome.NOT_MEASURED)
    cells["broken"] = timed[0] & ~timed[1] & cells.status_b.ne(Status.UNSUPPORTED)
    return cells


def ratio_of_means(
    under: Sequence[float], over: Sequence[float], line: Line
) -> tuple[float, float, float, float]:
    """Return exp(mean over - mean under) with its 95 % interval and p; NaN without both."""
    if not len(under) or not len(over) or np.isnan([*under, *over]).any():
        return (np.nan,) * 4
    ratio, half = welch(under, over)
    if min(len(under), len(over)) < FEWEST:
        half = float(np.fmax(np.log1p(line["tolerance"]), half))  # Welch's is NaN for one process
    elif {*line["cards_a"]}.isdisjoint(line["cards_b"]):
        half = float(np.hypot(half, np.hypot(line["between_a"], line["between_b"])))
    p = 1.0 if np.isnan(half) else _p_value(ratio, half)  # NaN: one card, and no variation
    value, low, high = np.exp([ratio, ratio - half, ratio + half]).tolist()
    return value, low, high, p


def _p_value(log: float, half: float) -> float:
    return 2 * float(scipy.stats.norm.sf(NORMAL * abs(log) / max(half, 1e-9)))


def difference(before: Sequence[float], now: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of two gains and its interval, from the intervals of both.

    A gain is a tuple: its value, its ends, and the half in logs that cards added to them if both
    gains come from one card, else 0. Without the processes, this approximates what `ratio_of_means`
    returns.
    """
    ratio = float(np.log(now[0] / before[0]))
    squares = [
        max(0.0, (np.log(high / low) / 2) ** 2 - cards**2) for _, low, high, cards in (before, now)
    ]
    half = float(np.sqrt(sum(squares)))
    value, low, high = np.exp([ratio, ratio - half, ratio + half]).tolist()
    return value, low, high


def outcomes(tests: pd.DataFrame) -> list[str]:
    """Return the outcome of each test; "" without one."""
    tested = tests[tests.p.notna()]
    ends = zip(tested.low, tested.high, q_values(tested.p), strict=True)
    words = {place: str(among_many(*each)) for place, each in zip(tested.index, ends, strict=True)}
    return [words.get(place, "") for place in tests.index]


def tolerance(single: float, processes_a: int, processes_b: int) -> float:
    """Return the tolerance for means of several processes from that for single ones."""
    return float(single * np.sqrt(1 / processes_a + 1 / processes_b))


def _tolerance_of_looks(cells: pd.DataFrame) -> pd.Series:
    lengths = classes(cells.assign(median_us=cells[["median_us_a", "median_us_b"]].min(axis=1)))
    tolerances = lengths.map(APART).astype("float64").fillna(max(APART.values()))
    floors = OF_FLOOR * cells[["floor_a", "floor_b"]].max(axis=1)
    single = pd.concat([tolerances, floors], axis=1).max(axis=1)
    counts = zip(single, cells.processes_a, cells.processes_b, strict=True)
    return pd.Series([tolerance(*each) for each in counts], cells.index, dtype="float64")


def _require_equal_operands(a: Side, b: Side) -> None:
    """Raise if a problem has different digests."""
    first, second = (
        {row.case.problem.id: row.digest for run in side.runs for row in run.rows if row.digest}
        for side in (a, b)
    )
    for problem, found in second.items():
        expected = first.get(problem, found)
        if found != expected:
            where = f"{a.paths} and {b.paths}: problem {problem}"
            raise ResultError(f"{where}: expected operands {expected}, found {found}")
