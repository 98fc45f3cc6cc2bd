"""Two runs side by side, joined on the id of a case: equal ids have equal operands.

time_b_over_a      median time in b over that in a
speedup_b_over_a   speed-up in b over that in a, each over the baseline of its own run
agree              both runs have the same outcome; if one has none (too few processes, or no
                   noise floor), the intervals of the speed-ups overlap
"""

from dataclasses import dataclass

import pandas as pd

from sparsebench.errors import ResultError
from sparsebench.results.analysis import analyse
from sparsebench.results.environment import device_name
from sparsebench.results.frame import fields
from sparsebench.results.record import Status
from sparsebench.results.statistics import Outcome
from sparsebench.results.store import Run
from sparsebench.results.verdict import compared

KEYS = ["case_id", "scope", "cache"]
SIDES = ["status", "median_us", "low_us", "high_us", "interval"]
SIDES += ["speedup", "speedup_low", "speedup_high", "baseline_label"]
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


def compare(a: Run, b: Run) -> Comparison:
    """Join two runs; ResultError if they share no case, or if operands of one problem differ."""
    in_a, in_b = (c[~c.twin.astype(bool)] for c in (analyse(a).cases, analyse(b).cases))
    shared = in_a[KEYS].merge(in_b[KEYS])
    if shared.empty:
        found = f"{len(in_a)} and {len(in_b)} with none in common"
        raise ResultError(f"{a.path} and {b.path}: expected cases of both runs, found {found}")
    _require_equal_operands(a, b)
    named = ["op", *fields(in_a), "level", "format", "kernel", "label", "baseline", "twin"]
    cases = in_a[[*KEYS, *named, *SIDES]].merge(
        in_b[[*KEYS, *SIDES]], on=KEYS, suffixes=("_a", "_b"), validate="one_to_one"
    )
    cases["time_b_over_a"] = cases.median_us_b / cases.median_us_a
    cases["speedup_b_over_a"] = cases.speedup_b / cases.speedup_a
    other = cases.baseline_label_a != cases.baseline_label_b
    cases.loc[other, "speedup_b_over_a"] = float("nan")
    cases["agree"] = _agree(cases)
    names = device_name(a.environment), device_name(b.environment)
    return Comparison(*names, cases, _without(in_a, shared), _without(in_b, shared))


def _agree(cases: pd.DataFrame) -> pd.Series:
    """Say for each line whether the runs agree; NA where there is nothing to compare.

    NA is a baseline, a twin, and a line that has a speed-up in neither run, other baselines in
    each, or no support in one. A speed-up in one run only is a disagreement.
    """
    have_outcomes = cases.outcome_a.isin(list(Outcome)) & cases.outcome_b.isin(list(Outcome))
    low = cases[["speedup_low_a", "speedup_low_b"]].max(axis=1, skipna=False)
    high = cases[["speedup_high_a", "speedup_high_b"]].min(axis=1, skipna=False)
    agree = (low <= high).mask(have_outcomes, cases.outcome_a == cases.outcome_b).astype("boolean")
    base = cases.baseline_label_a.fillna(cases.baseline_label_b)
    there = compared(cases.assign(baseline_label=base))
    there &= base == cases.baseline_label_b.fillna(base)
    there &= cases.speedup_a.notna() | cases.speedup_b.notna()
    there &= (cases[["status_a", "status_b"]] != Status.UNSUPPORTED).all(axis=1)
    return agree.where(there, pd.NA)


def _require_equal_operands(a: Run, b: Run) -> None:
    """Refuse problems of one id with different digests: their times cannot be compared."""
    digests = {row.case.problem.id: row.digest for row in a.rows if row.digest}
    for row in b.rows:
        expected = digests.get(row.case.problem.id)
        if row.digest and expected and row.digest != expected:
            where = f"{a.path} and {b.path}: problem {row.case.problem.id}"
            raise ResultError(f"{where}: expected operands {expected}, found {row.digest}")


def _without(cases: pd.DataFrame, shared: pd.DataFrame) -> pd.DataFrame:
    kept = ~cases.set_index(KEYS).index.isin(shared.set_index(KEYS).index)
    return cases[kept].reset_index(drop=True)
