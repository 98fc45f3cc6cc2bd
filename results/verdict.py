"""Verdicts on a table of cases: each one against its baseline, with a correction for their number.

    outcome              by the interval of the speed-up and the noise floor (statistics.py);
                         faster and slower also need q <= 5 %, else inconclusive: among many
                         equal cases some look faster by chance
    more_processes       how many more would decide an inconclusive case
    speedup_above_floor  (baseline - launch) / (case - launch), of median times; launch is the
                         time of an almost empty op

Below FEWEST processes a case has no verdict; nor has a baseline, nor a twin, whose ratio is noise.
A run without A/A pairs has no noise floor; the outcome of its cases is NO_FLOOR.
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
        speedup_above_floor=_above_floor(cases, noise),
        outcome=pd.Series("", cases.index, dtype="str"),
        more_processes=pd.Series(pd.NA, cases.index, dtype="Int64"),
    )
    fit = cases.t_low.notna() & compared(cases)
    table.loc[fit & floor.isna(), "outcome"] = NO_FLOOR
    lines = table[fit & floor.notna()]
    logs = [np.log(speedups) for speedups in lines.speedups]
    q = q_values([float(p_value(d, f)) for d, f in zip(logs, lines.floor, strict=True)])
    found = [
        _outcome(*line)
        for line in zip(lines.speedup_low, lines.speedup_high, lines.floor, q, strict=True)
    ]
    more = [
        more_processes(d, f) if verdict is Outcome.INCONCLUSIVE else None
        for d, f, verdict in zip(logs, lines.floor, found, strict=True)
    ]
    table.loc[lines.index, "q"] = q
    table.loc[lines.index, "outcome"] = [str(verdict) for verdict in found]
    table.loc[lines.index, "more_processes"] = pd.array(more, dtype="Int64")
    return table


def compared(cases: pd.DataFrame) -> pd.Series:
    """Say which lines of a summary are compared with a baseline other than themselves."""
    named = cases.baseline_label.notna() & (cases.label != cases.baseline_label)
    return named & ~cases.twin.astype(bool)


def _outcome(low: float, high: float, floor: float, q: float) -> Outcome:
    found = outcome(low, high, floor)
    return Outcome.INCONCLUSIVE if found in DIFFERENT and q > FALSE_DISCOVERIES else found


def _above_floor(cases: pd.DataFrame, noise: Noise | None) -> pd.Series:
    """Return the ratio of the medians less the launch time; NaN where one is not above it."""
    measures = pd.MultiIndex.from_frame(cases[["scope", "cache"]])
    launch_us = measures.map(noise.launch_us if noise else {}).to_numpy(dtype=float)
    place = ["problem_id", "scope", "cache"]
    medians = cases.set_index([*place, "label"]).median_us
    bases = pd.MultiIndex.from_frame(cases[[*place, "baseline_label"]])
    case_us = cases.median_us.to_numpy(dtype=float) - launch_us
    base_us = medians.reindex(bases).to_numpy(dtype=float) - launch_us
    known = (case_us > 0) & (base_us > 0)
    ratio = np.divide(base_us, case_us, out=np.full(len(cases), np.nan), where=known)
    return pd.Series(ratio, cases.index)
