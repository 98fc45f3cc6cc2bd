"""Do two runs of one plan agree? Compared cell by cell; what it shows depends on the machines.

a cell    a case against its baseline, in one scope and cache state
agreed    both runs have the same outcome; if one has no outcome (too few processes), the
          intervals of the speed-up overlap, or the speed-ups are no further apart than the
          larger of the two noise floors

the same machine   equal UUIDs of the GPUs: the machine repeats its results
the same kind      equal names of the devices: the results hold for more than one unit
another device     the results carry over; only ratios to the local baseline are compared
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from sparsebench.errors import ResultError
from sparsebench.results.compare import Comparison, compare
from sparsebench.results.environment import device_name, flat
from sparsebench.results.record import Status
from sparsebench.results.statistics import FEWEST, Outcome
from sparsebench.results.store import Run

ENOUGH = 0.95  # of the cells: a 95 % interval misses in one case of twenty


class Place(StrEnum):
    """Where a run was measured again. A CPU has no UUID: at most it is of the same kind."""

    SAME_MACHINE = "the same machine"
    SAME_KIND = "the same kind of device"
    ANOTHER = "another device"


@dataclass(frozen=True)
class Agreement:
    """Two runs compared. `found.cases.agree` is True or False for a cell, NA for any other line.

    cells      how many cells were compared
    agreed     how many of them agree
    looks      how many of them have no outcome in one of the runs: their intervals were compared
    one_sided  how many cases are unsupported in one run only
    same_code  in how many cases the compiled code is the same, and in how many it is known
    """

    place: Place
    found: Comparison
    cells: int
    agreed: int
    looks: int
    one_sided: int
    same_code: tuple[int, int]

    @property
    def reproduced(self) -> bool:
        """Say whether at least 95 % of the cells agree."""
        return self.agreed >= ENOUGH * self.cells

    @property
    def counts(self) -> dict[str, Any]:
        """Return the numbers for a script."""
        named = {"place": str(self.place), "reproduced": self.reproduced, "cells": self.cells}
        return named | {"agreed": self.agreed, "looks": self.looks, "one_sided": self.one_sided}

    @property
    def sentences(self) -> list[str]:
        """Return sentences: the result, the machine, and what was not compared."""
        word = "Reproduced" if self.reproduced else "Not reproduced"
        a, b = self.found.name_a, self.found.name_b
        where = f"{self.place}, {b}"
        if self.place is Place.ANOTHER:
            where += f" after {a}: ratios to the local baseline alone"
        counted = f"{self.agreed} of {self.cells} cells agree"
        lines = [f"{word}: {counted} ({100 * self.agreed / self.cells:.1f} %) on {where}."]
        if self.looks:
            few = f"below {FEWEST} processes there is no outcome to compare"
            lines.append(f"A look, no verdict: {few}, in {self.looks} cells only intervals.")
        if self.one_sided:
            lines.append(f"Unsupported in one of the runs, and not compared: {self.one_sided}.")
        same, known = self.same_code
        if known:
            lines.append(f"Compiled to the same machine code: {same} of {known} kernels.")
        return lines


def agreement(first: Run, second: Run) -> Agreement:
    """Compare two runs; ResultError if they have no cell in common."""
    found = compare(first, second)
    cases = found.cases.copy()
    have_outcomes = cases.outcome_a.isin(list(Outcome)) & cases.outcome_b.isin(list(Outcome))
    floor = np.log1p(cases[["floor_a", "floor_b"]].max(axis=1))
    close = np.log(cases.speedup_b_over_a).abs() <= floor
    cases["agree"] = cases.agree.mask(cases.agree.notna() & ~have_outcomes & close, True)
    cells = int(cases.agree.notna().sum())
    if not cells:
        expected = "a case with a speed-up in either and supported in both"
        raise ResultError(f"{first.path} and {second.path}: expected {expected}, found none")
    where = _place(first, second)
    if where is Place.ANOTHER:
        cases["time_b_over_a"] = np.nan
    one_sided = (cases.status_a == Status.UNSUPPORTED) != (cases.status_b == Status.UNSUPPORTED)
    return Agreement(
        where,
        replace(found, cases=cases),
        cells,
        int(cases.agree.sum()),
        int((cases.agree.notna() & ~have_outcomes).sum()),
        int(one_sided.sum()),
        _same_code(first, second),
    )


def _place(first: Run, second: Run) -> Place:
    before, now = flat(first.environment), flat(second.environment)
    if "gpu.uuid" in before and before["gpu.uuid"] == now.get("gpu.uuid"):
        return Place.SAME_MACHINE
    same = device_name(first.environment) == device_name(second.environment)
    return Place.SAME_KIND if same else Place.ANOTHER


def _same_code(first: Run, second: Run) -> tuple[int, int]:
    """Count the cases with the same compiled code in both runs, and those with known code.

    A digest says by a prefix of what it is (`sass:`); digests of two kinds are not comparable.
    """
    before, now = ({r.case.id: r.code for r in run.rows if r.code} for run in (first, second))
    pairs = [(before[case], now[case]) for case in before.keys() & now.keys()]
    known = [(a, b) for a, b in pairs if a.rpartition(":")[0] == b.rpartition(":")[0]]
    return sum(a == b for a, b in known), len(known)
