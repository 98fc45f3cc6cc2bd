"""Detect badly tuned contenders, ours included.

    slower than its default     within one contest, `tuned=True` is slower than `tuned=False`
    slower than in another run  the other run, on the same GPU model, was faster at the same case

The times that a search measured (Row.candidates) are not used: in a search, short calls measure 5 %
faster than in a contest, and a contender with several GEMMs runs a separate search for each.

A doubt is not an error: the times are real. It means that another kernel's speedup over this
contender may be due to a bad choice of configuration.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sparsebench.errors import ResultError
from sparsebench.results.record import Status
from sparsebench.results.run import store
from sparsebench.results.run.provenance import device_name
from sparsebench.results.run.store import StoredRun
from sparsebench.results.tables.frame import KEYS, fields, frame, records

SLOWER = 1.05  # ratio to the default's time; most A/A pairs within a process differ by less
APART = 1.10  # ratio to the other run's time
SEARCHES = r"\b(?:tuned|search)=(\S+)"  # options that turn tuning on or off


@dataclass(frozen=True)
class Doubt:
    """One badly tuned case: its expected time and the measured one.

    `run` is the name of the run with the row; "" if there is only one.
    """

    run: str
    case: str
    expected_time: str
    measured_time: str

    def __str__(self) -> str:
        run = f"{self.run}: " if self.run else ""
        return f"{run}{self.case}: expected {self.expected_time}, found {self.measured_time}"


def doubts(table: pd.DataFrame, run: str = "") -> list[Doubt]:
    """Return the tuned contenders of a frame that are slower than their defaults."""
    recipe = ["problem_id", "scope", "cache", "format", "kernel", "params", "rest"]
    cases = _cases(table).sort_values("search", ascending=False, kind="stable")
    # A contender without the option is tuned if a rival has False, and not if one has True.
    tuned = cases[cases.search != "False"].drop_duplicates(recipe).sort_index()
    default = cases[cases.search != "True"].drop_duplicates(recipe)
    pairs = tuned.merge(default[[*recipe, "us", "label"]], on=recipe, suffixes=("", "_default"))
    return [
        Doubt(
            run,
            _text(line, fields(table)),
            f"at most {line['us_default']:.1f} µs, as {line['label_default']}",
            f"{line['us']:.1f} µs",
        )
        for line in records(pairs[pairs.us > SLOWER * pairs.us_default])
    ]


def slower_than_elsewhere(tables: Mapping[str, pd.DataFrame]) -> list[Doubt]:
    """Return the cases that took longer in one run than in another.

    `tables` are the frames of runs on one kind of GPU, by the runs' names.
    """
    cases = pd.concat([_cases(table).assign(run=run) for run, table in tables.items()])
    cases = cases.sort_values("us")
    best, worst = (cases.drop_duplicates(KEYS, keep=end) for end in ("first", "last"))
    pairs = best[[*KEYS, "us", "run"]].merge(worst, on=KEYS, suffixes=("_best", ""))
    return [
        Doubt(
            line["run"],
            _text(line, fields(tables[line["run"]])),
            f"about {line['us_best']:.1f} µs, as in {line['run_best']}",
            f"{line['us']:.1f} µs",
        )
        for line in records(pairs[pairs.us > APART * pairs.us_best])
    ]


def warnings(run: StoredRun, others: Iterable[Path] = ()) -> Iterator[str]:
    """Yield a line for each doubt within a run, and between it and the runs in `others`.

    Skips runs on another kind of GPU, and yields a line for each run that cannot be read.
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
        if doubt.run == run.path.name:  # and not of one beside it
            yield f"warning: {doubt}"


def siblings(path: Path) -> list[Path]:
    """Return the other runs in the folder of a run, which it is published with."""
    here = Path(os.path.realpath(path))  # which a link to itself does not make raise
    return [run for run in store.runs_in(here.parent) if run != here]


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
