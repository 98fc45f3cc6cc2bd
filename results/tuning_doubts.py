"""Was everybody at their best? What casts doubt on a tuned contender, ours included.

    slower than its default    in the same contest: `tuned=True` beside `tuned=False`
    another run                the same case on the same kind of GPU took another time there

A search's own times (Row.candidates) are no judge: short calls take 5 % less there than in a
contest, and a contender of several products has a search for each.

A finding is no error: the rows are what was measured. It says that a lead over this contender may
be a lead over a bad choice. Nothing here needs more than frames (frame.py).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from sparsebench.errors import ResultError
from sparsebench.results import store
from sparsebench.results.frame import fields, frame
from sparsebench.results.provenance import device_name
from sparsebench.results.record import Status
from sparsebench.results.store import Run

SLOWER = 1.05  # times its default; most A/A pairs of one process differ by less
APART = 1.10  # times what another run measured
SEARCHES = "tuned", "search"  # options by which a contender is at its best, or as it comes
KEY = ["case_id", "scope", "cache"]


@dataclass(frozen=True)
class Finding:
    """One doubt: about which case, what was expected of its time, and what was found.

    run     the name of the run whose row it is; "" where there is only one
    beside  the run that it is held against, if it is another
    """

    run: str
    case: str
    expected: str
    found: str
    beside: str = ""

    def __str__(self) -> str:
        """Return one line for a reader."""
        run = f"{self.run}: " if self.run else ""
        return f"{run}{self.case}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True)
class Line:
    """A case in one scope and cache state: medians over the processes, in µs.

    case     as a reader knows it: op, fields, contender, scope and cache state
    contest  what its rivals share, and `recipe` what the same contender shares with other options
    """

    key: tuple[str, ...]
    contest: tuple[str, ...]
    recipe: tuple[str, ...]
    options: str
    label: str
    case: str
    median_us: float


def doubts(table: pd.DataFrame, run: str = "") -> list[Finding]:
    """Return the tuned contenders of a run that are slower than their defaults."""
    lines = _lines(table)
    return list(_beside(lines, run))


def apart(tables: Mapping[str, pd.DataFrame]) -> list[Finding]:
    """Return the cases that took other times in other runs; the slower run has the finding.

    tables  frames of runs on one kind of GPU, by the runs' names
    """
    times: dict[tuple[str, ...], list[tuple[float, str, str]]] = {}
    for run, table in tables.items():
        for line in _lines(table):
            times.setdefault(line.key, []).append((line.median_us, run, line.case))
    found = []
    for (best, where, _), (worst, run, case) in ((min(same), max(same)) for same in times.values()):
        if worst > APART * best:
            expected = f"about {best:.1f} µs, as in {where}"
            found.append(Finding(run, case, expected, f"{worst:.1f} µs", where))
    return found


def warnings(run: Run, beside: Iterable[Path] = ()) -> Iterator[str]:
    """Yield a line a finding: of this run, and of what it shares with the runs in `beside`.

    Runs on another kind of GPU are left out. One that cannot be read is named.
    """
    own = frame(run.rows)
    yield from (f"warning: {doubt}" for doubt in doubts(own))
    tables, problems = {run.path.name: own}, set(own.problem_id)
    for path in beside:
        try:
            other = store.read(path)
        except ResultError as error:
            yield f"warning: {path.name} is not compared: {error}"
            continue
        if device_name(other.environment) == device_name(run.environment):
            shared = [row for row in other.rows if row.case.problem.id in problems]
            tables[path.name] = frame(shared)
    for finding in apart(tables):
        if run.path.name in (finding.run, finding.beside):
            yield f"warning: {finding}"


def siblings(path: Path) -> list[Path]:
    """Return the other runs in the folder of a run: those that it is published with."""
    runs = (file.parent for file in path.resolve().parent.glob("*/run.json"))
    return sorted(run for run in runs if run != path.resolve())


def _lines(table: pd.DataFrame) -> list[Line]:
    """Return a line a case, scope and cache state of those that ran, twins left out."""
    named = [*fields(table), "op", "label", "format", "kernel", "params", "options"]
    columns = [*KEY, "problem_id", *named, "median_us"]
    right = table[(table.status == Status.OK) & ~table.twin.astype(bool)][columns]
    cases: dict[tuple[str, ...], list[dict[Any, Any]]] = {}
    for row in right.to_dict("records"):
        cases.setdefault(tuple(row[name] for name in KEY), []).append(row)
    found = []
    for key, rows in cases.items():
        row = rows[0]
        values = " ".join(f"{name}={row[name]}" for name in fields(table) if not pd.isna(row[name]))
        case = f"{row['op']} {values} {row['label']} ({row['scope']}, {row['cache']})"
        contest = row["problem_id"], row["scope"], row["cache"]
        recipe = row["format"], row["kernel"], row["params"]
        median_us = median(row["median_us"] for row in rows)
        found.append(Line(key, contest, recipe, row["options"], row["label"], case, median_us))
    return found


def _beside(lines: list[Line], run: str) -> Iterator[Finding]:
    """Yield those that are slower than the same contender in the same contest, as it comes."""
    same: dict[Any, dict[str, Line]] = {}
    for line in lines:
        search, rest = _asked(line.options)
        same.setdefault((line.contest, line.recipe, rest), {})[search] = line
    for ways in same.values():
        # Without the option a contender is tuned if its rival says False, and not if it says True.
        tuned, default = ways.get("True", ways.get("")), ways.get("False", ways.get(""))
        if tuned and default and tuned.median_us > SLOWER * default.median_us:
            expected = f"at most {default.median_us:.1f} µs, as {default.label}"
            yield Finding(run, tuned.case, expected, f"{tuned.median_us:.1f} µs")


def _asked(options: str) -> tuple[str, str]:
    """Split options: what the one of SEARCHES says ("" if there is none), and the others."""
    words = options.split()
    search = [word for word in words if word.partition("=")[0] in SEARCHES]
    rest = " ".join(word for word in words if word not in search)
    return (search[0].partition("=")[2] if search else ""), rest
