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
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from sparsebench.errors import ResultError
from sparsebench.results.analysis import Analysis, analyse
from sparsebench.results.environment import device_name
from sparsebench.results.frame import fields
from sparsebench.results.noise import classes
from sparsebench.results.record import Status
from sparsebench.results.statistics import Outcome
from sparsebench.results.store import Run
from sparsebench.results.verdict import compared

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
