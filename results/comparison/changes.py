"""What changed between two sides, cell by cell (compare.py), and over all cells.

    mean       exp( mean of log ratio +- mean of h )       over cells: geometric mean, 95 % interval

The cells of a side are not independent, because they share cards, days and often processes, and
nothing here estimates how strongly they depend on each other. But the standard deviation of a mean
is at most the mean of the standard deviations, whatever this dependence is. So the interval of a
mean is as wide as if all cells had one common error: it never shrinks with their number. It holds
for these cells alone, and says nothing about others.

A second run reproduces the first if no speedup has a settled change, and if no cell has a time in
one run only. If nothing differs, chance alone refuses 5 % of runs, however many cells they have. On
another kind of device speedups may differ, so there a settled change counts only if it also changes
the outcome of the cell.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from sparsebench.errors import ResultError
from sparsebench.results.comparison.causes import OUTSIDE, cause, differences
from sparsebench.results.comparison.compare import compare
from sparsebench.results.comparison.sides import Side, bundles, short_name, side
from sparsebench.results.formatting import between
from sparsebench.results.record import Status
from sparsebench.results.run import store
from sparsebench.results.run.provenance import device_name, flat
from sparsebench.results.run.store import StoredRun
from sparsebench.results.statistics.outcome import DIFFERENT, Outcome
from sparsebench.results.statistics.ratio import FEWEST
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.frame import records

GATE = re.compile(r"slower:(\d+(?:\.\d+)?) ?%")


@dataclass(frozen=True)
class Mean:
    """The geometric mean of a ratio over `cases` cases, with its 95 % interval."""

    value: float
    low: float
    high: float
    cases: int

    @property
    def text(self) -> str:
        """Write it in percent: `87 % [85, 89]`."""
        return between(100 * self.value, 100 * self.low, 100 * self.high, unit=" %")


@dataclass(frozen=True)
class Changes:
    """Side b against side a. `cases` has a line per cell, with the columns of `compare` and

        control  whether the baseline is a control     cause, why  where a change comes from

    differences  what else differs between the runs: name, in a, in b
    """

    a: Side
    b: Side
    cases: pd.DataFrame
    differences: list[tuple[str, str, str]]

    @property
    def same_device(self) -> bool:
        """Return whether both sides ran on one kind of device."""
        return self.a.device == self.b.device

    @property
    def contenders(self) -> pd.DataFrame:
        """Return the lines that are not baselines, without those that neither side measured."""
        return self.cases[~self.cases.is_baseline & self.cases.word.ne("")]

    @property
    def baselines(self) -> pd.DataFrame:
        return self.cases[self.cases.is_baseline]

    @property
    def counts(self) -> dict[str, int]:
        """Count the contenders by outcome, and those that broke."""
        words, broken = self.contenders.word.value_counts(), int(self.contenders.broken.sum())
        counts = {str(word): int(words[word]) for word in Outcome if word in words}
        return counts | ({"broken": broken} if broken else {})

    @property
    def missing(self) -> tuple[int, int]:
        """Count the cases of a that b lacks, and those of b that a lacks."""
        return len(self.a.cases) - len(self.cases), len(self.b.cases) - len(self.cases)

    @property
    def repeated(self) -> pd.DataFrame:
        """Return the cells that b was to repeat: with a speedup, and supported on both sides."""
        cells = self.contenders
        supported = (cells[["status_a", "status_b"]] != Status.UNSUPPORTED).all(axis=1)
        return cells[supported & (cells.gain.ne("") | cells.word.eq(Outcome.NOT_MEASURED))]

    @property
    def unrepeated(self) -> pd.DataFrame:
        """Return the cells that b does not repeat."""
        cells = self.repeated
        changed = cells.gain.isin(DIFFERENT)
        if not self.same_device:
            changed &= cells.outcome_a != cells.outcome_b
        return cells[changed | cells.word.eq(Outcome.NOT_MEASURED)]

    @property
    def looks(self) -> int:
        """Count the cells that too few processes measured on a side for a verdict."""
        return int((self.repeated[["processes_a", "processes_b"]].min(axis=1) < FEWEST).sum())


def changes(a: Side, b: Side) -> Changes:
    """Compare two sides; raises the errors of `compare`."""
    cells = compare(a, b)
    first, second = ([flat(run.environment) for run in side.runs] for side in (a, b))
    causes = [
        cause(line, first[line["run_a"]], second[line["run_b"]], a.device == b.device)
        for line in records(cells)
    ]
    columns = pd.DataFrame(causes, cells.index, ["control", "cause", "why"])
    cells[[*columns]] = columns.astype({"cause": str})
    return Changes(a, b, cells, differences(first[0], second[0]))


def threshold(text: str) -> float:
    """Read `slower:3%` as 0.03; raises ResultError for any other form."""
    match = GATE.fullmatch(text.strip())
    if not match:
        raise ResultError(f"--fail-on: expected slower:P%, such as slower:3%; found {text!r}")
    return float(match[1]) / 100


def gate_failures(changes: Changes, limit: float) -> pd.DataFrame:
    """Return the cases that broke, or whose kernel is slower by more than `limit`.

    A kernel is judged by its gain if the baseline is a control, or on another kind of device, and
    by its time if not. A change that comes from the card or the baseline fails no gate.
    """
    cases = changes.contenders
    by_gain = cases.control | (not changes.same_device)
    word, value = cases.gain.where(by_gain, cases.word), cases.ratio.where(by_gain, cases.time)
    slower = word.eq(Outcome.SLOWER) & (value < 1 / (1 + limit)) & ~cases.cause.isin(OUTSIDE)
    return cases[slower | cases.broken]


def other_devices(
    surveyed: Sequence[Analysis], paths: Iterable[Path]
) -> tuple[list[Changes], list[str]]:
    """Return the changes from a survey to other devices, and a line for each refused bundle.

    `surveyed` are the runs of the survey. Only cases that the survey has are read from the bundles
    below `paths`.
    """
    here = Side("this device", surveyed)
    problems = {row.case.problem.id for run in here.runs for row in run.rows}
    cases = {row.case.id for run in here.runs for row in run.rows}
    ours = {run.path.resolve() for run in here.runs}
    by_device: dict[str, list[StoredRun]] = {}
    others, errors = [], []
    for path in (path for path in bundles(paths) if path.resolve() not in ours):
        try:
            run = store.read(path)
        except ResultError as error:
            errors.append(str(error))
            continue
        rows = [row for row in run.rows if row.case.problem.id in problems]
        if not cases.isdisjoint(row.case.id for row in rows):
            by_device.setdefault(device_name(run.environment), []).append(replace(run, rows=rows))
    for device, runs in by_device.items():
        another = "another " if device == here.device else ""
        try:
            others.append(changes(here, side(*runs, name=another + short_name(device))))
        except ResultError as error:
            errors.append(str(error))
    return others, errors


def problem_fields(cases: pd.DataFrame) -> list[str]:
    """Return the columns of a comparison that are the op and fields of problems."""
    names = list(cases.columns)
    return [str(name) for name in names[names.index("op") : names.index("level")]]


def mean(cases: pd.DataFrame, of: list[str]) -> Mean | None:
    """Return the mean of TIME or GAIN over the cases that have it; None if none has.

    Every interval is symmetric in logs, so the ends of the mean's are the means of the ends.
    """
    logs = np.log(cases[of].dropna().to_numpy(dtype=float))
    if not len(logs):
        return None
    value, low, high = np.exp(logs.mean(axis=0)).tolist()
    return Mean(value, low, high, len(logs))
