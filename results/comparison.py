"""Two runs side by side, joined on the id of a case: equal ids have equal operands.

time_b_over_a      median time in b over that in a
speedup_b_over_a   speed-up in b over that in a, each over the baseline of its own run
tolerance          how far apart equal speed-ups of so many processes come out, a fraction
close              the two speed-ups are no further apart than that
agree              both runs have a verdict: the same outcome; or another one, but close, and not
                   faster in one and slower in the other. In a look: close

    tolerance = apart x sqrt(1 / processes of a + 1 / processes of b)

`apart` is of single processes, by the length of the call: APART, or the noise floors of the two
runs where those are larger. Equal speed-ups are further apart than that in 0 to 3 % of cells
(harness/NOTES.md).

Do two runs of one plan agree? Compared cell by cell; what it shows depends on the machines.

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
import pandas as pd
import scipy

from sparsebench.errors import ResultError
from sparsebench.results.analysis import Analysis, analyse, compared
from sparsebench.results.formatting import amount
from sparsebench.results.frame import fields
from sparsebench.results.noise import classes
from sparsebench.results.provenance import Choices, choices_of, device_name, flat
from sparsebench.results.record import Status
from sparsebench.results.statistics import FEWEST, Outcome
from sparsebench.results.store import Run

# The 99th percentile of |d_p - mean|, rounded up: d_p is a log speed-up in process p, of 1293 cases
# in published runs of 3 or 8 processes on an NVIDIA H200, the worse of the two (harness/NOTES.md).
APART = {"below 8 µs": 0.08, "8 to 20 µs": 0.07, "20 to 100 µs": 0.07, "above 100 µs": 0.05}
OF_FLOOR = 1.31  # a normal distribution's 99th percentile over its 95th, of absolute values
OPPOSITE = {(Outcome.FASTER, Outcome.SLOWER), (Outcome.SLOWER, Outcome.FASTER)}

KEYS = ["case_id", "scope", "cache"]
SIDES = ["status", "median_us", "low_us", "high_us", "interval"]
SIDES += ["speedup", "speedup_low", "speedup_high", "uncertainty", "baseline_label"]
SIDES += ["processes", "outcome", "floor", "q", "more_processes"]
SIDES += ["of_bound", "detail", "choice", "code", "mark"]


@dataclass(frozen=True)
class Comparison:
    """Two runs compared.

    cases   one line per case, scope and cache state of both; columns end in _a and _b
    only_a  lines of a's summary that b lacks; only_b likewise
    """

    name_a: str
    name_b: str
    cases: pd.DataFrame
    only_a: pd.DataFrame
    only_b: pd.DataFrame


def compare(a: Run, b: Run, known: tuple[Analysis, Analysis] | None = None) -> Comparison:
    """Join two runs; ResultError if they share no case, or if operands of one problem differ.

    `known` are their analyses, where they were made before.
    """
    both = known or (analyse(a), analyse(b))
    in_a, in_b = (each.cases[~each.cases.twin.astype(bool)] for each in both)
    shared = in_a[KEYS].merge(in_b[KEYS])
    if shared.empty:
        alone = f"{len(in_a)} and {len(in_b)} with none in common"
        raise ResultError(f"{a.path} and {b.path}: expected cases of both runs, found {alone}")
    _require_equal_operands(a, b)
    named = ["op", *fields(in_a), "level", "format", "kernel", "label", "baseline", "twin"]
    cases = in_a[[*KEYS, *named, *SIDES]].merge(
        in_b[[*KEYS, *SIDES]], on=KEYS, suffixes=("_a", "_b"), validate="one_to_one"
    )
    cases["time_b_over_a"] = cases.median_us_b / cases.median_us_a
    cases["speedup_b_over_a"] = cases.speedup_b / cases.speedup_a
    other = cases.baseline_label_a != cases.baseline_label_b
    cases.loc[other, "speedup_b_over_a"] = float("nan")
    cases["tolerance"] = _tolerance(cases)
    cases["close"] = np.log(cases.speedup_b_over_a).abs() <= np.log1p(cases.tolerance)
    cases["agree"] = _agree(cases)
    names = device_name(a.environment), device_name(b.environment)
    return Comparison(*names, cases, _without(in_a, shared), _without(in_b, shared))


def looks(cases: pd.DataFrame) -> pd.Series:
    """Say which lines of a comparison have no verdict in one of the runs."""
    return ~(cases.outcome_a.isin(list(Outcome)) & cases.outcome_b.isin(list(Outcome)))


def tolerance(single: float, processes_a: int, processes_b: int) -> float:
    """Return how far apart means of so many processes come out, of what single ones do."""
    return float(single * np.sqrt(1 / processes_a + 1 / processes_b))


def _tolerance(cases: pd.DataFrame) -> pd.Series:
    lengths = classes(cases.assign(median_us=cases[["median_us_a", "median_us_b"]].min(axis=1)))
    known = lengths.map(APART).astype("float64").fillna(max(APART.values()))
    floors = OF_FLOOR * cases[["floor_a", "floor_b"]].max(axis=1)
    single = pd.concat([known, floors], axis=1).max(axis=1)
    counts = zip(single, cases.processes_a, cases.processes_b, strict=True)
    return pd.Series([tolerance(*each) for each in counts], cases.index, dtype="float64")


def _agree(cases: pd.DataFrame) -> pd.Series:
    """Say for each line whether the runs agree; NA where there is nothing to compare.

    NA is a baseline, a twin, and a line that has a speed-up in neither run, other baselines in
    each, or no support in one. A speed-up in one run only is a disagreement.
    """
    pairs = pd.Series(zip(cases.outcome_a, cases.outcome_b, strict=True), cases.index, dtype=object)
    agree = cases.close & ~pairs.isin(OPPOSITE)
    agree |= ~looks(cases) & (cases.outcome_a == cases.outcome_b)
    agree = agree.astype("boolean")
    base = cases.baseline_label_a.fillna(cases.baseline_label_b)
    there = compared(cases.assign(baseline_label=base))
    there &= base == cases.baseline_label_b.fillna(base)
    there &= cases.speedup_a.notna() | cases.speedup_b.notna()
    there &= (cases[["status_a", "status_b"]] != Status.UNSUPPORTED).all(axis=1)
    return agree.where(there, pd.NA)


def _require_equal_operands(a: Run, b: Run) -> None:
    """Refuse problems of one id with different digests: their times cannot be compared.

    A simulated run drew no operands, so it has none to differ.
    """
    digests = {row.case.problem.id: row.digest for row in a.rows if _drawn(row.digest)}
    for row in b.rows:
        expected = digests.get(row.case.problem.id)
        if _drawn(row.digest) and expected and row.digest != expected:
            where = f"{a.path} and {b.path}: problem {row.case.problem.id}"
            raise ResultError(f"{where}: expected operands {expected}, found {row.digest}")


def _drawn(digest: str | None) -> bool:
    return bool(digest) and not str(digest).startswith("simulated ")


def _without(cases: pd.DataFrame, shared: pd.DataFrame) -> pd.DataFrame:
    kept = ~cases.set_index(KEYS).index.isin(shared.set_index(KEYS).index)
    return cases[kept].reset_index(drop=True)


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
    choices_of: Choices
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
        choices_of(second.state),
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
