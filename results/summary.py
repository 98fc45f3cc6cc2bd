"""A frame as answers: one line a case over its processes, then who wins and from where on.

A process is the unit of replication: allocation, tuning and clocks differ between processes, and
more samples in one of them cannot show it.
"""

from typing import Any

import numpy as np
import pandas as pd

from sparsebench.results.frame import RATES, SPEEDUP, TIMES, fields

CONTEST = ["problem_id", "scope", "cache"]
SUMMED = ["level", "processes", "low_us", "high_us", "speedup_low", "speedup_high", "interval"]


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return a line a case: medians over its processes, geometric mean of their speed-ups.

    `low` and `high` are the range over processes where there are several, else the quartiles in the
    one; `interval` says which. A case is ok when it was in every process; else it has the status
    and detail of the first where it was not, and no numbers. `level` is the sparsity asked for, or
    the achieved one where none was asked for: weights from a file.
    """
    cases: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for line in table.to_dict("records"):
        processes = cases.setdefault((line["case_id"], line["scope"], line["cache"]), {})
        processes[line["replicate"]] = {str(name): value for name, value in line.items()}
    kept = [n for n in table.columns if n not in ("replicate", "attempt", *SPEEDUP[1:])]
    lines = [_case(list(processes.values())) for processes in cases.values()]
    types = {str(name): kind for name, kind in table.dtypes.items() if name in kept}
    floats = dict.fromkeys([n for n in SUMMED if n not in ("processes", "interval")], "float64")
    return pd.DataFrame(lines, columns=[*kept, *SUMMED]).astype({**types, **floats})


def winners(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest case of each problem, baselines included, and its lead.

    `lead` is the runner-up's time over the winner's; `tied` says that their intervals overlap.
    """
    raced = cases[(cases.status == "ok") & ~cases.twin.astype(bool)].sort_values("median_us")
    ranks = raced.groupby(CONTEST, sort=False).cumcount()
    best = raced[ranks == 0].sort_index()
    second = raced[ranks == 1].set_index(CONTEST)[["label", "median_us", "low_us"]]
    second = second.reindex(pd.MultiIndex.from_frame(best[CONTEST])).set_axis(best.index)
    return best.assign(
        runner_up=second.label,
        lead=second.median_us / best.median_us,
        tied=second.low_us <= best.high_us,
    )


def break_even(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the sparsity from which on each contender stays faster than the baseline.

    `break_even` lies between two measured levels, on a straight line of log speed-up over log
    density (a kernel whose time follows its non-zeros moves on one); where it is NaN, `note` says
    'below the first level' or 'not reached'.
    """
    keys = ["op", *(name for name in fields(cases) if name != "sparsity"), "scope", "cache"]
    keys += ["format", "kernel", "label", "baseline_label"]
    known = cases.speedup.notna() & cases.level.notna()
    raced = cases[known & ~cases.twin.astype(bool)]
    raced = raced[raced.label != raced.baseline_label]
    lines = []
    for key, group in raced.groupby(keys, sort=False, dropna=False):
        logs = np.log(group.speedup).groupby(group.level.round(6)).mean()
        lines.append(dict(zip(keys, key, strict=True)) | _crossing(logs))
    return pd.DataFrame(lines, columns=[*keys, "break_even", "note", "first_level", "last_level"])


def _case(processes: list[dict[str, Any]]) -> dict[str, Any]:
    bad = [process for process in processes if process["status"] != "ok"]
    paired = [process for process in processes if not np.isnan(process["speedup"])]
    used = bad or paired or processes
    case = used[0] | {"processes": len(processes), "level": used[0]["sparsity"]}
    if not case["level"] > 0:
        case["level"] = used[0]["sparsity_achieved"]
    if bad:
        return case
    case |= {name: _median([process[name] for process in used]) for name in [*TIMES, *RATES]}
    case["samples"] = sum(process["samples"] for process in used)
    return case | _interval(used)


def _interval(used: list[dict[str, Any]]) -> dict[str, Any]:
    times = [process["median_us"] for process in used]
    logs = np.log([process["speedup"] for process in used])
    if len(used) == 1:
        names = ["low_us", "high_us", "speedup", "speedup_low", "speedup_high"]
        values = [used[0][name] for name in ["q1_us", "q3_us", *SPEEDUP]]
        return dict(zip(names, values, strict=True)) | {"interval": "quartiles in one process"}
    return {
        "low_us": min(times),
        "high_us": max(times),
        "speedup": np.exp(logs.mean()),
        "speedup_low": np.exp(logs.min()),
        "speedup_high": np.exp(logs.max()),
        "interval": f"over {len(used)} processes",
    }


def _median(values: list[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return float(np.median(known)) if known else np.nan


def _crossing(logs: pd.Series) -> dict[str, Any]:
    """Find where log speed-up, indexed by level in ascending order, last turns positive."""
    levels, values = logs.index.to_numpy(dtype=float), logs.to_numpy(dtype=float)
    slower = np.flatnonzero(values < 0)
    result = {"break_even": np.nan, "note": "", "first_level": levels[0], "last_level": levels[-1]}
    if not slower.size:
        return result | {"note": "below the first level"}
    i = slower[-1]
    if i == len(values) - 1:
        return result | {"note": "not reached"}
    density = np.exp(
        np.interp(0, values[i : i + 2], np.log(np.maximum(1 - levels[i : i + 2], 1e-9)))
    )
    return result | {"break_even": 1 - float(density)}
