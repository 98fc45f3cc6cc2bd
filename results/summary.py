"""A frame as answers: one line a case over its processes, then who wins and from where on.

A process is the unit of replication: allocation, tuning and clocks differ between processes, and
more samples in one of them cannot show it. From FEWEST processes on a speed-up has an interval and
an outcome (statistics.py); with fewer it has a range: a look, not a verdict.
"""

from collections import Counter
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.results.frame import QUARTILES, RATES, SENSORS, TIMES, fields
from sparsebench.results.noise import Noise
from sparsebench.results.record import Status
from sparsebench.results.statistics import FEWEST, IntervalKind, hodges_lehmann, student
from sparsebench.results.verdict import judged

CONTEST = ["problem_id", "scope", "cache"]
FLOATS = ["level", "low_us", "high_us", "speedup_low", "speedup_high", "t_low", "t_high"]
SUMMED = ["ran", "processes", *FLOATS, "interval", "interval_kind", "speedups"]


class NoCrossing(StrEnum):
    """Why a contender has no break-even between the measured levels.

    BELOW  it is faster at every level: it breaks even below the first one
    ABOVE  it is slower at the last level: it breaks even above that one, or nowhere
    """

    BELOW = "below the first level"
    ABOVE = "not reached"


def summary(table: pd.DataFrame, noise: Noise | None = None) -> pd.DataFrame:
    """Return a line a case: medians over its processes, and its speed-up over the baseline.

    The speed-up is the Hodges-Lehmann estimate, `speedup_low` and `speedup_high` its 95 % interval,
    `t_low` and `t_high` Student's. Below FEWEST processes it is the geometric mean, with the range
    over processes where there are several, else the quartiles in the one; `interval` says which.
    `speedups` holds each process's own; `low_us` and `high_us` are the range or quartiles of times.
    `ran` is the label, and of a portfolio also the kernel that it chose.

    A case is ok when it was in every process; else it has the status and detail of the first where
    it was not, and no numbers. `level` is the sparsity asked for, or the achieved one where none
    was asked for: weights from a file. Verdicts (verdict.py) need the run's noise floor.
    """
    cases: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for line in table.to_dict("records"):
        processes = cases.setdefault((line["case_id"], line["scope"], line["cache"]), {})
        processes[line["replicate"]] = {str(name): value for name, value in line.items()}
    dropped = "replicate", "attempt", "reference", "aa_log", *QUARTILES
    kept = [name for name in table.columns if name not in dropped]
    lines = [_case(list(processes.values())) for processes in cases.values()]
    types = {str(name): kind for name, kind in table.dtypes.items() if name in kept}
    summed = pd.DataFrame(lines, columns=[*kept, *SUMMED])
    return judged(summed.astype({**types, **dict.fromkeys(FLOATS, "float64")}), noise)


def winners(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest case of each problem, baselines included, and its lead; `ran` names it.

    The fastest has the largest speed-up, and `lead` is its ratio to the runner-up, process by
    process; `tied` says that the 95 % interval of that ratio does not lie above 1. Below FEWEST
    processes and without a baseline it has the least median time, `lead` is the runner-up's time
    over its own, and `tied` says that the ranges of their times overlap.
    """
    raced = cases[(cases.status == Status.OK) & ~cases.twin.astype(bool)]
    raced = raced.assign(ratio=raced.speedup.where(raced.t_low.notna()))
    raced = raced.sort_values(["ratio", "median_us"], ascending=[False, True], kind="stable")
    ranks = raced.groupby(CONTEST, sort=False).cumcount()
    best = raced[ranks == 0].sort_index().drop(columns="ratio")
    second = raced[ranks == 1].set_index(CONTEST)[["ran", "median_us", "low_us", "speedups"]]
    second = second.reindex(pd.MultiIndex.from_frame(best[CONTEST])).set_axis(best.index)
    lead = (second.median_us / best.median_us).to_numpy(copy=True)
    tied = (second.low_us <= best.high_us).to_numpy(copy=True)
    for i, pair in enumerate(zip(best.speedups, second.speedups, strict=True)):
        if _judged_together(*pair):
            ratio = hodges_lehmann(np.subtract(*np.log(pair)))
            lead[i], tied[i] = np.exp(ratio.estimate), not ratio.low > 0
    return best.assign(runner_up=second.ran, lead=lead, tied=tied)


def break_even(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the sparsity from which on each contender stays faster than the baseline.

    `break_even` lies between two measured levels, on a straight line of log speed-up over log
    density (a kernel whose time follows its non-zeros moves on one); where it is NaN, `note` says
    'below the first level' or 'not reached'. A level at which a portfolio chose a dense kernel is
    not faster; after such a level `break_even` is the next one.
    """
    keys = ["op", *(name for name in fields(cases) if name != "sparsity"), "scope", "cache"]
    keys += ["format", "kernel", "label", "baseline_label"]
    known = cases.speedup.notna() & cases.level.notna()
    raced = cases[known & ~cases.twin.astype(bool)]
    raced = raced[raced.label != raced.baseline_label]
    lines = []
    for key, group in raced.groupby(keys, sort=False, dropna=False):
        logs = np.log(group.speedup).mask(chose_dense(group), -np.inf)
        logs = logs.groupby(group.level.round(6)).mean()
        lines.append(dict(zip(keys, key, strict=True)) | _crossing(logs))
    return pd.DataFrame(lines, columns=[*keys, "break_even", "note", "first_level", "last_level"])


def chose_dense(cases: pd.DataFrame) -> pd.Series:
    """Say in which cases a portfolio chose a dense kernel: no win of any other format."""
    return cases.chosen.str.contains("dense, ", regex=False).astype(bool)


def _judged_together(first: Any, second: Any) -> bool:
    """Say whether two speed-ups by process are over one baseline in the same FEWEST processes."""
    known = isinstance(first, tuple) and isinstance(second, tuple)
    return known and len(first) == len(second) >= FEWEST and not np.isnan([first, second]).any()


def _case(processes: list[dict[str, Any]]) -> dict[str, Any]:
    bad = [process for process in processes if process["status"] != Status.OK]
    used = bad or _paired(processes) or processes
    case = used[0] | {"processes": len(processes), "level": used[0]["sparsity"]}
    if not case["level"] > 0:
        case["level"] = used[0]["sparsity_achieved"]
    case["chosen"] = " or ".join(sorted({process["chosen"] for process in used} - {""}))
    case["ran"] = _ran(case["label"], case["chosen"])
    if bad:
        return case
    measured = [*TIMES, *RATES, *SENSORS]
    case |= {name: _median([process[name] for process in used]) for name in measured}
    case["samples"] = sum(process["samples"] for process in used)
    marks = {mark for process in used for mark in process["mark"].split(", ")}
    case["mark"] = ", ".join(sorted(marks - {""}))
    return case | _interval(used)


def _ran(label: str, chosen: str) -> str:
    """Name a contender; one that chose a dense kernel by that kernel."""
    if not chosen.startswith("dense, "):
        return f"{label} (chosen: {chosen})" if chosen else label
    return f"{chosen.replace(', ', '/', 1)} (chosen by {label})"


def _paired(processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the processes that have a speed-up over the same baseline: the most common one."""
    paired = [process for process in processes if not np.isnan(process["speedup"])]
    bases = Counter(process["baseline_label"] for process in paired).most_common(1)
    return [process for process in paired if process["baseline_label"] == bases[0][0]]


def _interval(used: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the speed-up and the times of a case with their intervals, and what those are."""
    count, times = len(used), [process["median_us"] for process in used]
    speedups = tuple(process["speedup"] for process in used)
    logs = np.log(speedups)
    low_us, high_us, kind = min(times), max(times), IntervalKind.RANGE
    ratios = np.exp([logs.mean(), logs.min(), logs.max(), np.nan, np.nan]).tolist()
    if count == 1:
        low_us, high_us, kind = used[0]["q1_us"], used[0]["q3_us"], IntervalKind.QUARTILES
        ratios[1:3] = used[0]["speedup_q1"], used[0]["speedup_q3"]
    elif count >= FEWEST and not np.isnan(logs).any():
        exact, check = hodges_lehmann(logs), student(logs)
        kind = IntervalKind.CONFIDENCE
        ratios = np.exp([exact.estimate, exact.low, exact.high, check.low, check.high]).tolist()
    names = ["speedup", "speedup_low", "speedup_high", "t_low", "t_high"]
    facts = {"low_us": low_us, "high_us": high_us, "speedups": speedups}
    facts |= {"interval": kind.over(count), "interval_kind": str(kind)}
    return facts | dict(zip(names, ratios, strict=True))


def _median(values: list[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return float(np.median(known)) if known else np.nan


def _crossing(logs: pd.Series) -> dict[str, Any]:
    """Find where log speed-up, indexed by level in ascending order, last turns positive."""
    levels, values = logs.index.to_numpy(dtype=float), logs.to_numpy(dtype=float)
    slower = np.flatnonzero(values < 0)
    result = {"break_even": np.nan, "note": "", "first_level": levels[0], "last_level": levels[-1]}
    if not slower.size:
        return result | {"note": str(NoCrossing.BELOW)}
    i = slower[-1]
    if i == len(values) - 1:
        return result | {"note": str(NoCrossing.ABOVE)}
    if np.isneginf(values[i]):
        return result | {"break_even": levels[i + 1]}
    density = np.exp(
        np.interp(0, values[i : i + 2], np.log(np.maximum(1 - levels[i : i + 2], 1e-9)))
    )
    return result | {"break_even": 1 - float(density)}
