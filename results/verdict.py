"""Verdicts on a table of cases: each one against its baseline, with a correction for their number.

    outcome              by the interval of the speed-up (statistics.py); faster and slower also
                         need q <= 5 %, else inconclusive: among many equal cases some look faster
    more_processes       how many more would decide an inconclusive case
    uncertainty          of a speed-up: to the farther end of its interval, at least what the A/A
                         pairs of the run allow, speedup x floor / sqrt(processes); of a baseline 0
    speedup_above_floor  (baseline - launch) / (case - launch), where baseline is speedup x case;
                         launch is the time of an almost empty op

Below FEWEST processes a case has no verdict; nor has a baseline, nor a twin, whose ratio is noise.
A run without A/A pairs cannot show that equal things come out equal: its outcomes are NO_FLOOR.
"""

import numpy as np
import pandas as pd

from sparsebench.results.noise import Noise
from sparsebench.results.statistics import (
    FALSE_DISCOVERIES,
    Outcome,
    more_processes,
    outcome,
    p_value,
    q_values,
)

NO_FLOOR = "no_noise_floor"
DIFFERENT = (Outcome.FASTER, Outcome.SLOWER)


def with_verdicts(cases: pd.DataFrame, noise: Noise | None) -> pd.DataFrame:
    """Return a summary with its verdicts; a case without one has the outcome ""."""
    floor = noise.floor(cases) if noise else pd.Series(np.nan, cases.index)
    floor = floor.where(cases.median_us.notna())
    table = cases.assign(
        floor=floor,
        q=np.nan,
        uncertainty=uncertainty(
            cases.speedup, cases.speedup_low, cases.speedup_high, floor, cases.processes
        ),
        speedup_above_floor=_above_floor(cases, noise),
        outcome=pd.Series("", cases.index, dtype="str"),
        more_processes=pd.Series(pd.NA, cases.index, dtype="Int64"),
    )
    table.loc[cases.label == cases.baseline_label, "uncertainty"] = 0.0
    fit = cases.t_low.notna() & compared(cases)
    table.loc[fit & floor.isna(), "outcome"] = NO_FLOOR
    lines = table[fit & floor.notna()]
    logs = [np.log(speedups) for speedups in lines.speedups]
    q = q_values([float(p_value(d)) for d in logs])
    found = [_outcome(*line) for line in zip(lines.speedup_low, lines.speedup_high, q, strict=True)]
    more = [
        more_processes(d) if verdict is Outcome.INCONCLUSIVE else None
        for d, verdict in zip(logs, found, strict=True)
    ]
    table.loc[lines.index, "q"] = q
    table.loc[lines.index, "outcome"] = [str(verdict) for verdict in found]
    table.loc[lines.index, "more_processes"] = pd.array(more, dtype="Int64")
    return table


def compared(cases: pd.DataFrame) -> pd.Series:
    """Say which lines of a summary are compared with a baseline other than themselves."""
    named = cases.baseline_label.notna() & (cases.label != cases.baseline_label)
    return named & ~cases.twin.astype(bool)


def uncertainty(
    ratio: pd.Series, low: pd.Series, high: pd.Series, floor: pd.Series, processes: pd.Series
) -> pd.Series:
    """Return how far ratios may be off: to the farther end, at least what A/A pairs allow."""
    least: pd.Series = ratio * floor / np.sqrt(processes.astype("float64"))
    apart: pd.Series = pd.concat([ratio - low, high - ratio, least], axis=1).max(axis=1)
    return apart


def _outcome(low: float, high: float, q: float) -> Outcome:
    found = outcome(low, high)
    return Outcome.INCONCLUSIVE if found in DIFFERENT and q > FALSE_DISCOVERIES else found


def _above_floor(cases: pd.DataFrame, noise: Noise | None) -> pd.Series:
    """Return the speed-up less the launch time; NaN where one of the times is not above it."""
    measures = pd.MultiIndex.from_frame(cases[["scope", "cache"]])
    launch_us = measures.map(noise.launch_us if noise else {}).to_numpy(dtype=float)
    case_us = cases.median_us - launch_us
    base_us = cases.speedup * cases.median_us - launch_us
    ratio: pd.Series = (base_us / case_us).where((case_us > 0) & (base_us > 0))
    return ratio
