"""Detect badly tuned contenders, ours included.

    slower than its default     within one contest, `tuned=True` is slower than `tuned=False`
    slower than in another run  the other run, on the same GPU model, was faster at the same case

The times that a search measured (Row.candidates) are not used: in a search, short calls measure 5 %
faster than in a contest, and a contender with several GEMMs runs a separate search for each.

A doubt is not an error: the times are real. It means that another kernel's speedup over this
contender may be due to a bad choice of configuration.
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

SLOWER = 1.05  # ratio to the default's time; most A/A pairs within a process differ by less
APART = 1.10  # ratio to the other run's time
SEARCHES = "tuned", "search"  # options that turn tuning on or off
KEY = ["case_id", "scope", "cache"]


@dataclass(frozen=True)
class Doubt:
    """One badly tuned case: its expected time and the measured one.

    run    name of the run with the row; "" if there is only one
    other  the run that it is compared with, if another
    """

    run: str
    case: str
    expected: str
    found: str
    other: str = ""

    def __str__(self) -> str:
        run = f"{self.run}: " if self.run else ""
        return f"{run}{self.case}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True)
class Line:
    """A case in one scope and cache state, with its median time over the processes in µs.

    case     its description: op, fields, contender, scope and cache state
    contest  what it shares with its rivals
    recipe   what it shares with the same contender under other options
    """

    key: tuple[str, ...]
    contest: tuple[str, ...]
    recipe: tuple[str, ...]
    options: str
    label: str
    case: str
    median_us: float


def doubts(table: pd.DataFrame, run: str = "") -> list[Doubt]:
    """Return the tuned contenders of a frame that are slower than their defaults."""
    variants: dict[Any, dict[str, Line]] = {}
    for line in _lines(table):
        search, rest = _split(line.options)
        variants.setdefault((line.contest, line.recipe, rest), {})[search] = line
    doubtful = []
    for by_search in variants.values():
        # A contender without the option is tuned if a rival has False, and not if one has True.
        tuned = by_search.get("True", by_search.get(""))
        default = by_search.get("False", by_search.get(""))
        if tuned and default and tuned.median_us > SLOWER * default.median_us:
            expected = f"at most {default.median_us:.1f} µs, as {default.label}"
            doubtful.append(Doubt(run, tuned.case, expected, f"{tuned.median_us:.1f} µs"))
    return doubtful


def slower_than_elsewhere(tables: Mapping[str, pd.DataFrame]) -> list[Doubt]:
    """Return the cases that took longer in one run than in another.

    `tables` are the frames of runs on one kind of GPU, by the runs' names.
    """
    times: dict[tuple[str, ...], list[tuple[float, str, str]]] = {}
    for run, table in tables.items():
        for line in _lines(table):
            times.setdefault(line.key, []).append((line.median_us, run, line.case))
    doubtful = []
    for same in times.values():
        (best, other, _), (worst, run, case) = min(same), max(same)
        if worst > APART * best:
            expected = f"about {best:.1f} µs, as in {other}"
            doubtful.append(Doubt(run, case, expected, f"{worst:.1f} µs", other))
    return doubtful


def warnings(run: Run, others: Iterable[Path] = ()) -> Iterator[str]:
    """Yield a line for each doubt within a run, and between it and the runs in `others`.

    Runs on another kind of GPU are skipped, and a line names any that cannot be read.
    """
    table = frame(run.rows)
    yield from (f"warning: {doubt}" for doubt in doubts(table))
    tables, problems = {run.path.name: table}, set(table.problem_id)
    for path in others:
        try:
            other = store.read(path)
        except ResultError as error:
            yield f"warning: {path.name} is not compared: {error}"
            continue
        if device_name(other.environment) == device_name(run.environment):
            shared = [row for row in other.rows if row.case.problem.id in problems]
            tables[path.name] = frame(shared)
    for doubt in slower_than_elsewhere(tables):
        if run.path.name in (doubt.run, doubt.other):
            yield f"warning: {doubt}"


def siblings(path: Path) -> list[Path]:
    """Return the other runs in the folder of a run, which it is published with."""
    runs = (file.parent for file in path.resolve().parent.glob("*/run.json"))
    return sorted(run for run in runs if run != path.resolve())


def _lines(table: pd.DataFrame) -> list[Line]:
    """Return a line per ok case, scope and cache state, without twins."""
    names = [*fields(table), "op", "label", "format", "kernel", "params", "options"]
    columns = [*KEY, "problem_id", *names, "median_us"]
    right = table[(table.status == Status.OK) & ~table.twin.astype(bool)][columns]
    cases: dict[tuple[str, ...], list[dict[Any, Any]]] = {}
    for row in right.to_dict("records"):
        cases.setdefault(tuple(row[name] for name in KEY), []).append(row)
    lines = []
    for key, rows in cases.items():
        row = rows[0]
        values = " ".join(f"{name}={row[name]}" for name in fields(table) if not pd.isna(row[name]))
        lines.append(
            Line(
                key=key,
                contest=(row["problem_id"], row["scope"], row["cache"]),
                recipe=(row["format"], row["kernel"], row["params"]),
                options=row["options"],
                label=row["label"],
                case=f"{row['op']} {values} {row['label']} ({row['scope']}, {row['cache']})",
                median_us=median(row["median_us"] for row in rows),
            )
        )
    return lines


def _split(options: str) -> tuple[str, str]:
    """Split options: the value of one of SEARCHES ("" if there is none), and the others."""
    words = options.split()
    search = [word for word in words if word.partition("=")[0] in SEARCHES]
    rest = " ".join(word for word in words if word not in search)
    return (search[0].partition("=")[2] if search else ""), rest
