"""How a report writes outcomes, and which cases it draws with hollow markers.

    faster, slower, equal             the outcome of a case (results/statistics/outcome.py)
    not settled (+3 would settle)     three more processes would settle it
    –                                 no verdict: a baseline, or fewer than FEWEST processes

With fewer than FEWEST processes (a look) the range or the quartiles replace the verdict.
"""

from typing import Any

import pandas as pd

from sparsebench.results.formatting import between
from sparsebench.results.statistics.outcome import (
    FALSE_DISCOVERIES,
    MARGIN,
    UNDECIDED,
    VERDICTS,
    Outcome,
)
from sparsebench.results.statistics.ratio import MOST, IntervalKind


def any_verdict(cases: pd.DataFrame) -> bool:
    return bool(cases.outcome.isin(VERDICTS).any())


def clear(cases: pd.DataFrame) -> pd.Series:
    """Return which cases are faster: by their verdicts, or in a look by their whole interval."""
    return cases.outcome == Outcome.FASTER if any_verdict(cases) else cases.speedup_low > 1


def is_undecided(cases: pd.DataFrame) -> pd.Series:
    """Return which cases may be as fast as the baseline; in a look the interval contains 1."""
    spans = (cases.speedup_low <= 1) & (cases.speedup_high >= 1)
    return spans.where(~cases.outcome.isin(VERDICTS), cases.outcome.isin(UNDECIDED))


def meaning(cases: pd.DataFrame) -> tuple[str, str]:
    """Return in words what `clear` and `is_undecided` mean for these cases."""
    if not any_verdict(cases):
        return "the whole interval is above 1", "the interval contains 1"
    faster = f"the whole interval is above 1, its upper end is at least {1 + MARGIN:g}"
    rate = f"{100 * FALSE_DISCOVERIES:g} %"
    return f"{faster}, and q ≤ {rate}", f"equal within {100 * MARGIN:g} %, or not settled"


def outcome(line: "pd.Series[Any]") -> str:
    """Write the outcome of a case; a dash if it has none."""
    text = str(line.outcome)
    if line.outcome != Outcome.NOT_SETTLED:
        return text or "–"
    if pd.isna(line.more_processes):
        return f"{text} ({MOST} processes would not settle it)"
    return f"{text} (+{line.more_processes} would settle it)"


def speedup(line: Any) -> str:
    """Write the speedup of a case with its interval; 1 for the baseline itself."""
    if line.label == line.baseline_label:
        return "1"
    return between(line.speedup, line.speedup_low, line.speedup_high, line.uncertainty)


def spans(cases: pd.DataFrame) -> str:
    """Return a sentence that says what the intervals of times hold."""
    single = cases[cases.median_us.notna()].processes == 1
    names = ["range over processes"] * bool((~single).any())
    names += ["quartiles of the samples in one process"] * bool(single.any())
    return f"Intervals of times: {' or '.join(names)}."


def intervals(cases: pd.DataFrame) -> str:
    """Return a sentence that says what the intervals of speedups hold."""
    cases = cases[cases.interval != ""]
    exact = cases.interval_kind == IntervalKind.CONFIDENCE
    sure = [f"{name} (Hodges-Lehmann)" for name in sorted(cases.interval[exact].unique())]
    looks = sorted(cases.interval[~exact].unique())
    caution = ". Ranges are not verdicts." if sure else "; these are not confidence intervals."
    if cases.empty:
        return ""
    return f"Intervals of speedups: {', '.join(sure + looks)}{caution if looks else '.'}"
