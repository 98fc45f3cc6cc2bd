"""Two runs side by side, case by case: joined on the id of a case, which names the same bits.

time_b_over_a      how the machines differ
speedup_b_over_a   how the contenders differ, each against the baseline of its own machine
"""

from dataclasses import dataclass

import pandas as pd

from sparsebench.results._errors import ResultError
from sparsebench.results.environment import device_name
from sparsebench.results.frame import fields, frame
from sparsebench.results.store import Run
from sparsebench.results.summary import summary

KEYS = ["case_id", "scope", "cache"]
SIDES = ["status", "median_us", "low_us", "high_us", "interval"]
SIDES += ["speedup", "speedup_low", "speedup_high", "baseline_label"]


@dataclass(frozen=True)
class Comparison:
    """Two runs compared.

    cases   a line for each case in both; columns end in _a and _b
    only_a  the lines of a's summary that b does not have, and only_b likewise
    """

    name_a: str
    name_b: str
    cases: pd.DataFrame
    only_a: pd.DataFrame
    only_b: pd.DataFrame


def compare(a: Run, b: Run) -> Comparison:
    """Join two runs; a ResultError where they share no case, or a case with other operands."""
    ours, theirs = summary(frame(a.rows)), summary(frame(b.rows))
    shared = ours[KEYS].merge(theirs[KEYS])
    if shared.empty:
        found = f"{len(ours)} and {len(theirs)} with none in common"
        raise ResultError(f"{a.path} and {b.path}: expected cases of both runs, found {found}")
    _require_equal_operands(a, b)
    named = ["op", *fields(ours), "level", "format", "kernel", "label", "baseline", "twin"]
    cases = ours[[*KEYS, *named, *SIDES]].merge(
        theirs[[*KEYS, *SIDES]], on=KEYS, suffixes=("_a", "_b"), validate="one_to_one"
    )
    cases["time_b_over_a"] = cases.median_us_b / cases.median_us_a
    cases["speedup_b_over_a"] = cases.speedup_b / cases.speedup_a
    other = cases.baseline_label_a != cases.baseline_label_b
    cases.loc[other, "speedup_b_over_a"] = float("nan")
    names = device_name(a.environment), device_name(b.environment)
    return Comparison(*names, cases, _without(ours, shared), _without(theirs, shared))


def _require_equal_operands(a: Run, b: Run) -> None:
    """Refuse problems of one id whose operands have unequal digests: their times say nothing."""
    digests = {row.case.problem.id: row.digest for row in a.rows if row.digest}
    for row in b.rows:
        expected = digests.get(row.case.problem.id)
        if row.digest and expected and row.digest != expected:
            where = f"{a.path} and {b.path}: problem {row.case.problem.id}"
            raise ResultError(f"{where}: expected operands {expected}, found {row.digest}")


def _without(cases: pd.DataFrame, shared: pd.DataFrame) -> pd.DataFrame:
    kept = ~cases.set_index(KEYS).index.isin(shared.set_index(KEYS).index)
    return cases[kept].reset_index(drop=True)
