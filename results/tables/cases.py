"""The cases of a run: one line per case, scope and cache state, with an interval and a verdict.

    rows of frame.py ─> estimates ─> with_verdicts

The process is the unit of replication: allocation, tuning and clocks differ between processes, and
more samples in one process cannot show that. With FEWEST or more processes a speedup has an
interval and an outcome (statistics/ratio.py): a verdict. With fewer it has a range: a look.

    outcome              from the interval; faster and slower also need q <= 5 %, else the case is
                         not settled, because among many equal cases some appear faster
    more_processes       how many more processes would settle a case
    uncertainty          of a speedup: the distance to the farther end of its interval, and at
                         least speedup x floor / sqrt(processes), which the A/A pairs allow; 0 for
                         a baseline

Baselines and twins have no verdict. A run without A/A pairs cannot show that equal kernels come
out equal, so its cases have no verdicts.
"""

from collections import Counter
from collections.abc import Mapping
from math import isnan
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.results.record import POWER_LIMITED, Status
from sparsebench.results.statistics.between_cards import count_cards, half_of
from sparsebench.results.statistics.outcome import Outcome, among_many
from sparsebench.results.statistics.ratio import (
    FEWEST,
    IntervalKind,
    more_processes,
    p_value,
    q_values,
    ratio,
    student,
)
from sparsebench.results.tables.frame import (
    QUARTILES,
    RATES,
    SENSORS,
    TIMES,
    UNDER_LOAD,
    fields,
    records,
    table_of,
)
from sparsebench.results.tables.noise import Noise

CONTEST = ["problem_id", "scope", "cache"]
FLOATS = ["level", "low_us", "high_us", "speedup_low", "speedup_high", "t_low", "t_high", "between"]
SUMMARY = [
    "ran",
    "processes",
    "on_cards",
    "limited_processes",
    *FLOATS,
    "interval",
    "interval_kind",
    "speedups",
    "blocks",
]
# Weights from a file count as the requested level up to this relative difference of density.
OTHER_LEVEL = 0.01
DENSE = "dense, "  # begins the choice of a dense kernel


def summary(table: pd.DataFrame, noise: Noise | None = None) -> pd.DataFrame:
    """Return the estimates of all cases with verdicts, which need the noise of the run."""
    return with_verdicts(estimates(table), noise)


def estimates(table: pd.DataFrame) -> pd.DataFrame:
    """Return one line per case, scope and cache state: medians over processes, and intervals.

    speedup       Hodges-Lehmann estimate; with fewer than FEWEST processes the geometric mean
    same_zeros    the same over the baseline with pruned weights (frame.py)
    speedup_low   and speedup_high: the interval, of kind `interval_kind`; `interval` is its text,
                  "" without a speedup
    t_low         and t_high: Student's 95 % interval from the processes alone, if FEWEST or more
    between       half of the interval between cards, in logs, which widens the interval; NaN if it
                  is unknown (between_cards.py), and then the speedup has no interval
    on_cards      the number of cards that the processes ran on; 0 on a CPU
    limited_processes
                  the number of processes in which power or heat lowered the clock for more than
                  POWER_LIMITED of the time; NA if no process knows. `limited` is the median share
    speedups      the speedup of each process
    processes     the number of processes used: fewer than the run has if the baseline failed in
                  some, or if only some captured the case in a graph
    blocks        median times by round for each (replicate, attempt), for statistics.ratio_over
    low_us        and high_us: range of the medians of the processes; for one process, quartiles
    ran           the label; for a portfolio also the kernel that it chose
    level         sparsity of the problem. Weights from a file may have more zeros than the problem
                  asks for; then `level` and `sparsity` are what they have

    A case that is not ok in every process has the status and detail of the first process in which
    it is not, and no numbers.
    """
    cases: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for line in records(table):
        processes = cases.setdefault((line["case_id"], line["scope"], line["cache"]), {})
        processes[line["replicate"]] = line
    dropped = "replicate", "attempt", "reference", "aa_log", "blocks_us", *QUARTILES
    names = [name for name in table.columns if name not in dropped]
    lines = [_case(list(processes.values())) for processes in cases.values()]
    types = {str(name): kind for name, kind in table.dtypes.items() if name in names}
    types |= dict.fromkeys(FLOATS, np.dtype("float64"))
    types |= dict.fromkeys(("on_cards", "limited_processes"), pd.Int64Dtype())
    return table_of(lines, [*names, *SUMMARY], types)


def with_verdicts(cases: pd.DataFrame, noise: Noise | None) -> pd.DataFrame:
    """Add verdicts to a summary; a case without a verdict has the outcome ""."""
    floor = noise.floor(cases) if noise else pd.Series(np.nan, cases.index)
    floor = floor.where(cases.median_us.notna())
    table = cases.assign(
        floor=floor,
        q=np.nan,
        uncertainty=uncertainty(
            cases.speedup, cases.speedup_low, cases.speedup_high, floor, cases.processes
        ),
        outcome=pd.Series("", cases.index, dtype="str"),
        more_processes=pd.Series(pd.NA, cases.index, dtype="Int64"),
    )
    table.loc[cases.label == cases.baseline_label, "uncertainty"] = 0.0
    is_interval = cases.interval_kind.eq(IntervalKind.CONFIDENCE)
    lines = table[is_interval & has_baseline(cases) & floor.notna()]
    logs = [np.log(speedups) for speedups in lines.speedups]
    q = q_values([float(p_value(d, half)) for d, half in zip(logs, lines.between, strict=True)])
    outcomes = [
        among_many(*line) for line in zip(lines.speedup_low, lines.speedup_high, q, strict=True)
    ]
    more = [
        more_processes(d, between=half) if verdict is Outcome.NOT_SETTLED else None
        for d, half, verdict in zip(logs, lines.between, outcomes, strict=True)
    ]
    table.loc[lines.index, "q"] = q
    table.loc[lines.index, "outcome"] = [str(verdict) for verdict in outcomes]
    table.loc[lines.index, "more_processes"] = pd.array(more, dtype="Int64")
    return table


def has_baseline(cases: pd.DataFrame) -> pd.Series:
    """Return which lines of a summary are compared with a baseline other than themselves."""
    named = cases.baseline_label.notna() & (cases.label != cases.baseline_label)
    return named & ~cases.twin.astype(bool)


def uncertainty(
    ratio: pd.Series, low: pd.Series, high: pd.Series, floor: pd.Series, processes: pd.Series
) -> pd.Series:
    """Return the uncertainty of ratios: to the farther end, at least what A/A pairs allow."""
    least: pd.Series = ratio * floor / np.sqrt(processes.astype("float64"))
    half: pd.Series = pd.concat([ratio - low, high - ratio, least], axis=1).max(axis=1)
    return half


def by_size(cases: pd.DataFrame) -> pd.DataFrame:
    """Sort cases by the fields of their problems, because a run takes them in random order."""
    names = ["op", *fields(cases), "source", "seed"]
    names = [name for name in names if cases[name].nunique(dropna=False) > 1] or ["op"]
    return cases.sort_values(names, key=_sizes, kind="stable", ignore_index=True)


def dense_choice(chosen: str) -> str:
    """Return A or B if a portfolio's processes chose "dense, A or dense, B", and "" if none did."""
    choices = (choice for choice in chosen.split(" or ") if choice.startswith(DENSE))
    return " or ".join(choice.removeprefix(DENSE) for choice in choices)


def chose_dense(cases: pd.DataFrame) -> pd.Series:
    """Return in which cases a portfolio chose a dense kernel, so that no sparse format won."""
    return cases.chosen.map(dense_choice).astype(bool)


def _case(processes: list[dict[str, Any]]) -> dict[str, Any]:
    bad = [process for process in processes if process["status"] != Status.OK]
    used = bad or _with_common_baseline(_with_common_clock(processes))
    count = len(processes) if bad else len(used)
    level = _level(used[0])
    case = used[0] | {"processes": count, "level": level}
    if case["sparsity"] > 0:
        case["sparsity"] = level
    case["chosen"] = " or ".join(sorted({process["chosen"] for process in used} - {""}))
    case["ran"] = _ran(case["label"], case["chosen"])
    if bad:
        return case
    for name in (*TIMES, *RATES, *SENSORS, *UNDER_LOAD):
        values = [process[name] for process in used if not isnan(process[name])]
        case[name] = median(values) if values else np.nan  # np.median takes 20 times as long
    case["samples"] = sum(process["samples"] for process in used)
    case["late"] = float(np.fmax.reduce([process["late"] for process in used]))
    for name in ("mark", "marks"):
        marks = {mark for process in used for mark in process[name].split(", ")}
        case[name] = ", ".join(sorted(marks - {""}))
    shares = [process["limited"] for process in used if not isnan(process["limited"])]
    case["limited_processes"] = sum(share > POWER_LIMITED for share in shares) if shares else pd.NA
    return case | _interval(used, case)


def _level(case: Mapping[str, Any]) -> float:
    """Return the sparsity that the problem asks for, or that weights from a file have instead."""
    requested, achieved = float(case["sparsity"]), float(case["sparsity_achieved"])
    from_file = case["source"] is not None and not pd.isna(case["source"])
    other = from_file and abs(achieved - requested) > OTHER_LEVEL * (1 - requested)
    return achieved if other or not requested > 0 else requested


def _ran(label: str, chosen: str) -> str:
    """Name what ran: the label, with the kernel that a portfolio chose, dense kernels first."""
    if not chosen.startswith(DENSE):
        return f"{label} (chosen: {chosen})" if chosen else label
    return f"{chosen.replace(DENSE, 'dense/')} (chosen by {label})"


def _with_common_clock(processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the processes with the most common clock: in a graph, times have no launch gap."""
    ((clock, _),) = Counter(process["clock"] for process in processes).most_common(1)
    return [process for process in processes if process["clock"] == clock]


def _with_common_baseline(processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the processes with a speedup over the most common baseline; all if none has one."""
    paired = [process for process in processes if not isnan(process["speedup"])]
    bases = Counter(process["baseline_label"] for process in paired).most_common(1)
    return [p for p in paired if p["baseline_label"] == bases[0][0]] or processes


def _interval(processes: list[dict[str, Any]], case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the speedup and the times of a case, with their intervals."""
    count, times = len(processes), [process["median_us"] for process in processes]
    speedups = tuple(process["speedup"] for process in processes)
    logs, low_us, high_us = np.log(speedups), min(times), max(times)
    cards = [str(process["device"]) for process in processes]
    what = case["kernel"], case["median_us"], case["scope"]
    between = half_of([*logs], cards, *what) if count >= FEWEST else 0.0
    estimate = ratio([*logs[:, None]], between)
    on_zeros = tuple(process["same_zeros"] for process in processes)
    same = on_zeros == speedups  # unless the baseline has unpruned weights
    low, high, t_low, t_high = estimate.low, estimate.high, np.nan, np.nan
    if count == 1:
        low_us, high_us = processes[0]["q1_us"], processes[0]["q3_us"]
        low, high = processes[0]["speedup_q1"], processes[0]["speedup_q3"]
    elif estimate.interval_kind in (IntervalKind.CONFIDENCE, IntervalKind.NONE):
        check = student(logs)
        t_low, t_high = float(np.exp(check.low)), float(np.exp(check.high))
    return {
        "low_us": low_us,
        "high_us": high_us,
        "speedup": estimate.value,
        "speedup_low": low,
        "speedup_high": high,
        "same_zeros": estimate.value if same else ratio([*np.log(on_zeros)[:, None]]).value,
        "t_low": t_low,
        "t_high": t_high,
        "between": between,
        "on_cards": count_cards(cards),
        "speedups": speedups,
        "interval": ""
        if isnan(estimate.value)
        else estimate.interval_kind.over(count, between > 0),
        "interval_kind": str(estimate.interval_kind),
        "blocks": {(p["replicate"], p["attempt"]): p["blocks_us"] for p in processes},
    }


def _sizes(column: pd.Series) -> pd.Series:
    """Return the sort key of a column: its numbers if it has any, else its text."""
    numbers = pd.to_numeric(column, errors="coerce")
    return numbers if numbers.notna().any() else column.astype(str)
