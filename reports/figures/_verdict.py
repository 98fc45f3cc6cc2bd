"""How the page writes a verdict, and which cases it draws as decided.

    faster, slower, no difference     the outcome of a case (results/statistics.py)
    inconclusive (+3 would decide)    so many more processes
    –                                 none: a baseline, or fewer than FEWEST processes

Below FEWEST processes a look takes its place: is the whole range or are the quartiles above 1?
"""

from typing import Any

import pandas as pd

from sparsebench.reports.figures._html import times
from sparsebench.results.noise import LAUNCH_US
from sparsebench.results.statistics import FALSE_DISCOVERIES, MOST, IntervalKind, Outcome

UNDECIDED = (Outcome.NO_DIFFERENCE, Outcome.INCONCLUSIVE)


def judged(cases: pd.DataFrame) -> bool:
    """Say whether any case has a verdict."""
    return bool(cases.outcome.isin(list(Outcome)).any())


def clear(cases: pd.DataFrame) -> pd.Series:
    """Say which cases are clearly faster: by verdict, and in a look by the whole interval."""
    if judged(cases):
        return cases.outcome == Outcome.FASTER
    return cases.speedup_low > 1


def undecided(cases: pd.DataFrame) -> pd.Series:
    """Say which cases are not told apart from their baseline; in a look the interval holds 1."""
    spans = (cases.speedup_low <= 1) & (cases.speedup_high >= 1)
    return spans.where(~cases.outcome.isin(list(Outcome)), cases.outcome.isin(UNDECIDED))


def meaning(cases: pd.DataFrame) -> tuple[str, str]:
    """Say what `clear` and `undecided` mean among these cases."""
    if not judged(cases):
        return "the whole interval is above 1", "the interval holds 1"
    faster = f"the whole interval is beyond the noise floor, and q ≤ {100 * FALSE_DISCOVERIES:g} %"
    return faster, "no difference, or inconclusive"


def outcome(line: "pd.Series[Any]") -> str:
    """Write the outcome of a case; a dash where it has none."""
    words = str(line.outcome).replace("_", " ")
    if line.outcome != Outcome.INCONCLUSIVE:
        return words or "–"
    if pd.isna(line.more_processes):
        return f"{words} ({MOST} processes would not decide)"
    return f"{words} (+{line.more_processes} would decide)"


def above_floor(line: "pd.Series[Any]") -> str:
    """Write the speed-up above the cost of launching, where either time is mostly that."""
    short = line.median_us * min(1, line.speedup) < LAUNCH_US
    return times(line.speedup_above_floor) if short else "–"


def intervals(cases: pd.DataFrame) -> str:
    """Say what the intervals of these cases are."""
    exact = cases.interval_kind == IntervalKind.CONFIDENCE
    sure = [f"{interval} (Hodges-Lehmann)" for interval in sorted(cases.interval[exact].unique())]
    looks = sorted(cases.interval[~exact].unique())
    caution = ". Ranges are no verdict." if sure else "; they are not confidence intervals."
    return f"Intervals: {', '.join(sure + looks)}{caution if looks else '.'}"
