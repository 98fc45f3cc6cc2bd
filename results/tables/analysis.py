"""The tables of a run, computed from its rows whenever it is read; none of them is stored.

Run ─> rows    one line per row: ratios round by round, units (frame.py)
    ─> noise   A/A pairs and the noise floors (noise.py)
    ─> estimates  one line per case, scope and cache state, with its intervals (cases.py)
           ─> cases   the same, with its verdict, which a claim does not need
           ─> timed   the cases with a time, with their gains over dense (contests.py)
           ─> views   a grid for each choice of the fields (grid.py)
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import pandas as pd

from sparsebench.results.run.provenance import device_name
from sparsebench.results.run.store import StoredRun
from sparsebench.results.tables.cases import by_size, estimates, with_verdicts
from sparsebench.results.tables.contests import with_gains
from sparsebench.results.tables.frame import frame, records
from sparsebench.results.tables.grid import View, views
from sparsebench.results.tables.noise import Noise, noise


@dataclass(frozen=True, eq=False)
class Analysis:
    """A run with its tables; their columns are those of `frame`, `Noise` and `summary`.

    It equals only itself, so what is derived from it can be cached.
    """

    run: StoredRun
    rows: pd.DataFrame
    noise: Noise
    estimates: pd.DataFrame

    @property
    def device(self) -> str:
        return device_name(self.run.environment)

    @cached_property
    def cases(self) -> pd.DataFrame:
        """Return the estimates with verdicts."""
        return with_verdicts(self.estimates, self.noise)

    def of(self, cases: pd.DataFrame, run: StoredRun | None = None) -> Self:
        """Return the analysis of some of the cases, whose verdicts stay those among all."""
        some = replace(self, run=run or self.run, estimates=cases)
        vars(some)["cases"] = cases
        return some

    @cached_property
    def timed(self) -> pd.DataFrame:
        """Return the cases with a time, without twins, as `contests.with_gains` returns them."""
        return with_gains(self.cases)

    @cached_property
    def contests(self) -> dict[str, list[dict[str, Any]]]:
        """Return the estimates without twins by the id of their problem; on a GPU kernels, cold."""
        here = self.estimates[~self.estimates.twin.astype(bool)]
        if self.run.state["flags"]["device"] != "cpu":  # a CPU run has one scope and cache state
            here = here[(here.scope == "kernel") & (here.cache == "cold")]
        lines: dict[str, list[dict[str, Any]]] = {}
        for line in records(here):
            lines.setdefault(line["problem_id"], []).append(line)
        return lines

    @cached_property
    def views(self) -> list[View]:
        """Return the views for all choices of fields, the first to show in front."""
        return views(self.timed)


def analyse(run: StoredRun) -> Analysis:
    """Analyse a run. A million samples take about two seconds."""
    return Analysis(run, *tables(run))


def has_unpruned(run: StoredRun) -> bool:
    """Return whether a dense contender of the run multiplies unpruned weights."""
    return any(row.case.contender.is_unpruned for row in run.rows)


def on_same_zeros(run: StoredRun) -> StoredRun:
    """Return a run without the rows of unpruned weights, to compare it with one that has none."""
    return replace(run, rows=[row for row in run.rows if not row.case.contender.is_unpruned])


def tables(run: StoredRun) -> tuple[pd.DataFrame, Noise, pd.DataFrame]:
    """Return the rows, the noise and the estimates of a run."""
    rows = frame(run.rows)
    pairs = noise(rows, frame(run.reference))
    return rows, pairs, by_size(estimates(rows))
