"""Two sides joined case by case (sides.py), and whether a second run repeats the first.

Cases are joined on their ids; equal ids have equal operands.

    time_b_over_a      median time in b over that in a
    speedup_b_over_a   speedup in b over that in a, each over the baseline of the same run
    tolerance          half of the 95 % interval of the difference of equal speedups, as a fraction
    close              the distance of the two speedups is within the tolerance
    agree              close and not reversed, or equal in both; on another kind of device, where
                       speedups may differ, two verdicts with one outcome agree too
    reversed           faster in one run and slower in the other, by the processes alone, because
                       cards explain a difference but not a change of sign

    tolerance = sqrt( Welch's half^2 + between of a^2 + between of b^2 )       two verdicts
              = apart x sqrt(1 / processes of a + 1 / processes of b)          a look

`between` is the variation between cards (between_cards.py); it counts if no card ran the case in
both runs. `apart` holds for single processes, by the length of the call: APART, or the noise floors
of the two runs if they are larger. Equal speedups exceed it in 0 to 3 % of cells
(harness/NOTES.md).

A cell is a case against its baseline, in one scope and cache state. A run is reproduced if at least
95 % of the cells agree, or if chance alone explains how many disagree, and none is reversed. What
this shows depends on the machines:

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
from sparsebench.results.comparison.sides import Side, side
from sparsebench.results.formatting import amount
from sparsebench.results.record import Status
from sparsebench.results.run.provenance import Choices, choices_of, device_name, flat
from sparsebench.results.run.store import Run
from sparsebench.results.statistics.outcome import DIFFERENT, VERDICTS, Outcome, outcome
from sparsebench.results.statistics.ratio import FEWEST, welch
from sparsebench.results.tables.cases import has_baseline
from sparsebench.results.tables.frame import KEYS, fields, records
from sparsebench.results.tables.noise import classes

# The 99th percentile of |d_p - mean|, rounded up: d_p is a log speedup in process p, from 1293
# cases of published runs with 3 or 8 processes on an NVIDIA H200, the worse of the two
# (harness/NOTES.md).
APART = {"below 8 µs": 0.08, "8 to 20 µs": 0.07, "20 to 100 µs": 0.07, "above 100 µs": 0.05}
OF_FLOOR = 1.31  # a normal distribution's 99th percentile over its 95th, of absolute values
ENOUGH = 0.95  # share of cells that agree
FALSE_ALARM = 0.05  # share of equal cells whose distance exceeds the tolerance, in verdicts
FALSE_ALARM_OF_LOOKS = 0.01  # the same share in looks
CHANCE = 0.05  # probability that a good run with few cells counts as not reproduced

SIDES = ["status", "median_us", "low_us", "high_us", "interval"]
SIDES += ["speedup", "speedup_low", "speedup_high", "uncertainty", "baseline_label"]
SIDES += ["processes", "outcome", "floor", "q", "more_processes", "between", "t_low", "t_high"]
SIDES += ["of_bound", "detail", "choice", "mark", "speedups"]
SIDES += ["run", "times", "codes", "cards", "searched"]


@dataclass(frozen=True)
class Comparison:
    """Two sides, joined.

    cases   one line per case, scope and cache state of both; columns end in _a and _b
    only_a  lines of a's cases that b lacks, and `only_b` the reverse
    """

    cases: pd.DataFrame
    only_a: pd.DataFrame
    only_b: pd.DataFrame


class Place(StrEnum):
    """The machine of the second run. A CPU has no UUID, so it is at most of the same kind."""

    SAME_MACHINE = "the same machine"
    SAME_KIND = "the same kind of device"
    ANOTHER = "another device"


@dataclass(frozen=True)
class Agreement:
    """Two runs compared; `comparison.cases.agree` is a bool for each cell, NA for other lines.

    device     the second run's
    cells      number of cells compared
    agreed     cells that agree
    close      cells whose speedups are within the tolerance
    reversed   cells that are faster in one run and slower in the other, by the processes alone
    looks      cells without an outcome in one of the runs
    one_sided  cases that are unsupported in one run only
    choices    which process chose the configurations of the second run
    same_code  cases with equal compiled code, and cases whose code is known in both runs
    plugins    differences between the plug-ins of the two runs, a text for each
    """

    place: Place
    device: str
    comparison: Comparison
    cells: int
    agreed: int
    close: int
    reversed: int
    looks: int
    one_sided: int
    choices: Choices
    same_code: tuple[int, int]
    plugins: list[str]

    @property
    def reproduced(self) -> bool:
        """Return whether enough cells agree, and none is reversed."""
        if self.reversed:
            return False
        missed = self.cells - self.agreed
        alarms = FALSE_ALARM * (self.cells - self.looks) + FALSE_ALARM_OF_LOOKS * self.looks
        unlikely = scipy.stats.binom.sf(missed - 1, self.cells, alarms / self.cells) < CHANCE
        return self.agreed >= ENOUGH * self.cells or not unlikely

    @property
    def counts(self) -> dict[str, Any]:
        names = "reproduced", "cells", "agreed", "close", "reversed", "looks", "one_sided"
        counts = {name: getattr(self, name) for name in names}
        words = {"place": str(self.place), "choices": str(self.choices)}
        return {**words, **counts, "plugins": self.plugins}

    @property
    def sentences(self) -> list[str]:
        """Return the result, the machine and what was not compared, as sentences."""
        word = "Reproduced" if self.reproduced else "Not reproduced"
        if self.looks == self.cells:
            word = f"A look, {'consistent' if self.reproduced else 'not consistent'}"
        where = f"{self.place}, {self.device}"
        if self.place is Place.ANOTHER:
            where += ": only ratios to the local baseline"
        agree = "agrees" if self.cells == 1 else "agree"
        counts = f"{self.agreed} of {amount(self.cells, 'cell')} {agree}"
        lines = [f"{word}: {counts} ({100 * self.agreed / self.cells:.1f} %) on {where}."]
        cells = self.comparison.cases[self.comparison.cases.agree.notna()]
        least, most = 100 * cells.tolerance.min(), 100 * cells.tolerance.max()
        within = f"within the tolerance ({least:.2g} to {most:.2g} %, by processes and cards)"
        lines.append(f"Speedups {within}: {self.close} of {self.cells}.")
        if self.reversed:
            changed = f"{amount(self.reversed, 'cell')} changed from faster to slower or back"
            lines.append(f"{changed}; a run in which any cell does is not a reproduction.")
        lines.append(self.choices.sentence)
        if self.looks:
            few = f"Fewer than {FEWEST} processes give a look, not a verdict"
            looks = amount(self.looks, "cell")
            lines.append(f"{few}: in {looks} only the speedups were compared.")
        if self.one_sided:
            cases = amount(self.one_sided, "case")
            lines.append(f"Not compared: {cases}, unsupported in one of the runs.")
        same, compared_codes = self.same_code
        if compared_codes:
            lines.append(
                f"Compiled to the same machine code: {same} of {amount(compared_codes, 'kernel')}."
            )
        return lines + [f"The code of a plug-in differs: {which}." for which in self.plugins]


def compare(a: Side, b: Side) -> Comparison:
    """Join two sides; raises ResultError if they share no case, or operands of a problem differ."""
    in_a, in_b = a.cases, b.cases
    shared = in_a[KEYS].merge(in_b[KEYS])
    if shared.empty:
        counts = f"{len(in_a)} and {len(in_b)} with none in common"
        raise ResultError(
            f"{a.paths} and {b.paths}: expected a case that both have, found {counts}"
        )
    _require_equal_operands(a, b)
    columns = ["problem_id", "op", *fields(in_a), "source", "seed", "level", "format", "kernel"]
    columns += ["label", "baseline", "twin"]
    cases = in_a[[*KEYS, *columns, *SIDES]].merge(
        in_b[[*KEYS, *SIDES]], on=KEYS, suffixes=("_a", "_b"), validate="one_to_one"
    )
    cases["time_b_over_a"] = cases.median_us_b / cases.median_us_a
    cases["speedup_b_over_a"] = cases.speedup_b / cases.speedup_a
    other = cases.baseline_label_a != cases.baseline_label_b
    cases.loc[other, "speedup_b_over_a"] = float("nan")
    cases["tolerance"] = _tolerance(cases)
    cases["close"] = np.log(cases.speedup_b_over_a).abs() <= np.log1p(cases.tolerance)
    cases["agree"] = _agree(cases, another=a.device != b.device)
    return Comparison(cases, _without(in_a, shared), _without(in_b, shared))


def agreement(first: Run, second: Run) -> Agreement:
    """Compare two runs; raises ResultError if they have no cell in common."""
    one, other = side(first), side(second)
    comparison = compare(one, other)
    cases = comparison.cases.copy()
    in_both = cases.agree.notna()
    if not in_both.any():
        expected = "a case with a speedup in one run that both support"
        raise ResultError(f"{first.path} and {second.path}: expected {expected}, found none")
    place = _place(first, second)
    if place is Place.ANOTHER:
        cases["time_b_over_a"] = np.nan
    one_sided = (cases.status_a == Status.UNSUPPORTED) != (cases.status_b == Status.UNSUPPORTED)
    return Agreement(
        place=place,
        device=other.device,
        comparison=replace(comparison, cases=cases),
        cells=int(in_both.sum()),
        agreed=int(cases.agree.sum()),
        close=int((in_both & cases.close).sum()),
        reversed=int((in_both & _find_reversals(cases)).sum()),
        looks=int((in_both & looks(cases)).sum()),
        one_sided=int(one_sided.sum()),
        choices=choices_of(second.state),
        same_code=_same_code(cases),
        plugins=_plugins(first, second),
    )


def looks(cases: pd.DataFrame) -> pd.Series:
    """Return which lines of a comparison lack a verdict in one of the runs."""
    return ~(cases.outcome_a.isin(VERDICTS) & cases.outcome_b.isin(VERDICTS))


def tolerance(single: float, processes_a: int, processes_b: int) -> float:
    """Return the tolerance for means of several processes from that for single ones."""
    return float(single * np.sqrt(1 / processes_a + 1 / processes_b))


def same_code(a: set[str], b: set[str]) -> bool | None:
    """Return whether two sides compiled a case to equal code; None if that is unknown.

    A case has several digests if its processes searched. A prefix (`sass:`) names what a digest
    covers; only digests with equal prefixes are comparable.
    """
    covered = [{code.rpartition(":")[0] for code in codes} for codes in (a, b)]
    return a == b if a and b and covered[0] == covered[1] else None


def half_between(line: Mapping[Any, Any]) -> float:
    """Return the half, in logs, that cards add to the difference of two verdicts of a line."""
    apart = {*line["cards_a"]}.isdisjoint({*line["cards_b"]})
    return float(np.hypot(line["between_a"], line["between_b"])) if apart else 0.0


def _tolerance(cases: pd.DataFrame) -> pd.Series:
    """Return the tolerance of each line: by its processes and cards, or that of a look."""
    of_looks, values = _tolerance_of_looks(cases), []
    for line, least in zip(records(cases), of_looks, strict=True):
        enough = min(line["processes_a"], line["processes_b"]) >= FEWEST
        if enough and pd.notna(line["speedup_b_over_a"]):
            _, half = welch(np.log(line["speedups_a"]), np.log(line["speedups_b"]))
            values.append(float(np.expm1(np.hypot(half, half_between(line)))))
        else:
            values.append(least)
    return pd.Series(values, cases.index, dtype="float64")


def _tolerance_of_looks(cases: pd.DataFrame) -> pd.Series:
    lengths = classes(cases.assign(median_us=cases[["median_us_a", "median_us_b"]].min(axis=1)))
    tolerances = lengths.map(APART).astype("float64").fillna(max(APART.values()))
    floors = OF_FLOOR * cases[["floor_a", "floor_b"]].max(axis=1)
    single = pd.concat([tolerances, floors], axis=1).max(axis=1)
    counts = zip(single, cases.processes_a, cases.processes_b, strict=True)
    return pd.Series([tolerance(*each) for each in counts], cases.index, dtype="float64")


def _agree(cases: pd.DataFrame, another: bool) -> pd.Series:
    """Return for each line whether the runs agree; NA if there is nothing to compare.

    There is nothing to compare for baselines and twins, without a speedup in both runs, with
    different baselines, and if one run does not support the case. If only one run has a speedup,
    they disagree.
    """
    agree = cases.close & ~_find_reversals(cases)
    same = ~looks(cases) & (cases.outcome_a == cases.outcome_b)
    agree |= same if another else same & (cases.outcome_a == Outcome.EQUAL)
    agree = agree.astype("boolean")
    base = cases.baseline_label_a.fillna(cases.baseline_label_b)
    comparable = has_baseline(cases.assign(baseline_label=base))
    comparable &= base == cases.baseline_label_b.fillna(base)
    comparable &= cases.speedup_a.notna() | cases.speedup_b.notna()
    comparable &= (cases[["status_a", "status_b"]] != Status.UNSUPPORTED).all(axis=1)
    return agree.where(comparable, pd.NA)


def _find_reversals(cases: pd.DataFrame) -> pd.Series:
    """Return which cells are faster in one run and slower in the other, by Student's intervals."""
    ends = cases[["t_low_a", "t_high_a", "t_low_b", "t_high_b"]].itertuples(index=False)
    words = [{outcome(*each[:2]), outcome(*each[2:])} for each in ends]
    return pd.Series([pair == {*DIFFERENT} for pair in words], cases.index, dtype=bool)


def _require_equal_operands(a: Side, b: Side) -> None:
    """Raise if a problem has different digests; simulated runs draw no operands to compare."""
    rows_a, rows_b = ([row for run in each.runs for row in run.rows] for each in (a, b))
    digests = {row.case.problem.id: row.digest for row in rows_a if _has_operands(row.digest)}
    for row in rows_b:
        expected = digests.get(row.case.problem.id)
        if _has_operands(row.digest) and expected and row.digest != expected:
            where = f"{a.paths} and {b.paths}: problem {row.case.problem.id}"
            raise ResultError(f"{where}: expected operands {expected}, found {row.digest}")


def _has_operands(digest: str | None) -> bool:
    return bool(digest) and not str(digest).startswith("simulated ")


def _without(cases: pd.DataFrame, shared: pd.DataFrame) -> pd.DataFrame:
    left = ~cases.set_index(KEYS).index.isin(shared.set_index(KEYS).index)
    return cases[left].reset_index(drop=True)


def _place(first: Run, second: Run) -> Place:
    before, now = flat(first.environment), flat(second.environment)
    if "gpu.uuid" in before and before["gpu.uuid"] == now.get("gpu.uuid"):
        return Place.SAME_MACHINE
    same = device_name(first.environment) == device_name(second.environment)
    return Place.SAME_KIND if same else Place.ANOTHER


def _same_code(cases: pd.DataFrame) -> tuple[int, int]:
    """Count the cases with equal compiled code in both runs, and those with comparable digests."""
    each_once = cases.drop_duplicates("case_id")
    pairs = zip(each_once.codes_a, each_once.codes_b, strict=True)
    equalities = [same for a, b in pairs if (same := same_code(a, b)) is not None]
    return sum(equalities), len(equalities)


def _plugins(first: Run, second: Run) -> list[str]:
    """Return `acme 1.2 (0a1b2c3d) before, none now` for each plug-in that differs."""
    before, now = (run.environment.get("plugins", {}) for run in (first, second))
    return [
        f"{name} {_version(before.get(name))} before, {_version(now.get(name))} now"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def _version(facts: Mapping[str, Any] | None) -> str:
    return f"{facts['version']} ({facts['sha256'][:8]})" if facts else "none"
