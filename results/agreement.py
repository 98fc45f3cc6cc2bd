"""Do two runs of one plan agree? Compared cell by cell; what it shows depends on the machines.

a cell      a case against its baseline, in one scope and cache state
agreed      both runs have the same outcome, or their speed-ups are close (compare.py)
reproduced  at least 95 % of the cells agree, or chance alone makes so many disagree
a look      fewer than FEWEST processes in one of the runs: speed-ups are compared, not outcomes

the same machine   equal UUIDs of the GPUs: the machine repeats its results
the same kind      equal names of the devices: the results hold for more than one unit
another device     the results carry over; only ratios to the local baseline are compared
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import scipy

from sparsebench.errors import ResultError
from sparsebench.results.choices import Choices, choices
from sparsebench.results.compare import Comparison, compare, looks
from sparsebench.results.environment import device_name, flat
from sparsebench.results.record import Status
from sparsebench.results.statistics import FEWEST
from sparsebench.results.store import Run
from sparsebench.results.words import amount

ENOUGH = 0.95  # of the cells
FALSE_ALARM = 0.01  # of equal cells, beyond the tolerance (compare.py)
CHANCE = 0.05  # that a run with nothing wrong is said not to be reproduced, where cells are few


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
    close      of how many the speed-ups are within the tolerance
    looks      how many of them have no outcome in one of the runs
    one_sided  how many cases are unsupported in one run only
    choices    who chose the configurations of the second run
    same_code  in how many cases the compiled code is the same, and in how many it is known
    plugins    what differs between the plug-ins of the two runs, a text for each
    """

    place: Place
    found: Comparison
    cells: int
    agreed: int
    close: int
    looks: int
    one_sided: int
    choices: Choices
    same_code: tuple[int, int]
    plugins: list[str]

    @property
    def reproduced(self) -> bool:
        """Say whether at least 95 % of the cells agree, or as many as chance alone allows."""
        missed = self.cells - self.agreed
        unlikely = scipy.stats.binom.sf(missed - 1, self.cells, FALSE_ALARM) < CHANCE
        return self.agreed >= ENOUGH * self.cells or not unlikely

    @property
    def counts(self) -> dict[str, Any]:
        """Return the numbers for a script."""
        named = {"place": str(self.place), "reproduced": self.reproduced, "cells": self.cells}
        counted = {"agreed": self.agreed, "close": self.close, "looks": self.looks}
        others = {"one_sided": self.one_sided, "choices": str(self.choices)}
        return named | counted | others | {"plugins": self.plugins}

    @property
    def sentences(self) -> list[str]:
        """Return sentences: the result, the machine, and what was not compared."""
        word = "Reproduced" if self.reproduced else "Not reproduced"
        if self.looks == self.cells:
            word = f"A look, {'consistent' if self.reproduced else 'not consistent'}"
        a, b = self.found.name_a, self.found.name_b
        where = f"{self.place}, {b}"
        if self.place is Place.ANOTHER:
            where += f" after {a}: ratios to the local baseline alone"
        agree = "agrees" if self.cells == 1 else "agree"
        counted = f"{self.agreed} of {amount(self.cells, 'cell')} {agree}"
        lines = [f"{word}: {counted} ({100 * self.agreed / self.cells:.1f} %) on {where}."]
        cells = self.found.cases[self.found.cases.agree.notna()]
        least, most = 100 * cells.tolerance.min(), 100 * cells.tolerance.max()
        near = f"within the tolerance ({least:.2g} to {most:.2g} %, by length and processes)"
        lines.append(f"Speed-ups {near}: {self.close} of {self.cells}.")
        lines.append(self.choices.sentence)
        if self.looks:
            few = f"Fewer than {FEWEST} processes give a look, not a verdict"
            lines.append(
                f"{few}: in {amount(self.looks, 'cell')} speed-ups were compared, not outcomes."
            )
        if self.one_sided:
            lines.append(f"Unsupported in one of the runs, and not compared: {self.one_sided}.")
        same, known = self.same_code
        if known:
            lines.append(f"Compiled to the same machine code: {same} of {amount(known, 'kernel')}.")
        lines += [f"Other code of a plug-in: {which}." for which in self.plugins]
        return lines


def agreement(first: Run, second: Run) -> Agreement:
    """Compare two runs; ResultError if they have no cell in common."""
    found = compare(first, second)
    cases = found.cases.copy()
    compared = cases.agree.notna()
    cells = int(compared.sum())
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
        int((compared & cases.close).sum()),
        int((compared & looks(cases)).sum()),
        int(one_sided.sum()),
        choices(second.state),
        _same_code(first, second),
        _plugins(first, second),
    )


def _place(first: Run, second: Run) -> Place:
    before, now = flat(first.environment), flat(second.environment)
    if "gpu.uuid" in before and before["gpu.uuid"] == now.get("gpu.uuid"):
        return Place.SAME_MACHINE
    same = device_name(first.environment) == device_name(second.environment)
    return Place.SAME_KIND if same else Place.ANOTHER


def _same_code(first: Run, second: Run) -> tuple[int, int]:
    """Count the cases with the same compiled code in both runs, and those with known code.

    Processes that search anew may compile several. A digest says by a prefix of what it is
    (`sass:`); digests of two kinds are not comparable.
    """
    before, now = _codes(first), _codes(second)
    pairs = [(before[case], now[case]) for case in before.keys() & now.keys()]
    known = [(a, b) for a, b in pairs if _kinds(a) == _kinds(b)]
    return sum(a == b for a, b in known), len(known)


def _plugins(first: Run, second: Run) -> list[str]:
    """Return `acme 1.2 (0a1b2c3d) before, none now` of each plug-in that is not the same."""
    before, now = (run.environment.get("plugins", {}) for run in (first, second))
    return [
        f"{name} {_version(before.get(name))} before, {_version(now.get(name))} now"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def _version(facts: Mapping[str, Any] | None) -> str:
    return f"{facts['version']} ({facts['sha256'][:8]})" if facts else "none"


def _codes(run: Run) -> dict[str, set[str]]:
    """Return the digests of each case, over its processes."""
    found: dict[str, set[str]] = {}
    for row in run.rows:
        if row.code:
            found.setdefault(row.case.id, set()).add(row.code)
    return found


def _kinds(codes: set[str]) -> set[str]:
    return {code.rpartition(":")[0] for code in codes}
