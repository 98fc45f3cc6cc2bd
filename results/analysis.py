"""A run as three tables: the one way from samples to verdicts.

    Run ─> rows    one line per row: ratios block by block, units (frame.py)
        ─> noise   A/A pairs and the noise floors (noise.py)
        ─> cases   one line per case, scope and cache state, with its verdict (summary.py)

Nothing of it is on disk: it is computed from the rows whenever a run is read.

A frame as answers: one line per case over its processes, the fastest case, the break-even.

The process is the unit of replication: allocation, tuning and clocks differ between processes, and
more samples in one process cannot show that. From FEWEST processes on a speed-up has an interval
and an outcome (statistics.py): a verdict. With fewer it has a range: a look.

Verdicts on a table of cases: each one against its baseline, with a correction for their number.

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

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.results.frame import QUARTILES, RATES, SENSORS, TIMES, fields, frame
from sparsebench.results.noise import Noise, noise
from sparsebench.results.record import Status
from sparsebench.results.statistics import (
    FALSE_DISCOVERIES,
    IntervalKind,
    Outcome,
    Ratio,
    between,
    more_processes,
    outcome,
    p_value,
    q_values,
    ratio,
    student,
)
from sparsebench.results.store import Run


@dataclass(frozen=True)
class Analysis:
    """The tables of a run; their columns are those of `frame`, `Noise` and `summary`."""

    rows: pd.DataFrame
    noise: Noise
    cases: pd.DataFrame


def analyse(run: Run) -> Analysis:
    """Return the tables of a run. A million samples take about two seconds."""
    rows = frame(run.rows)
    found = noise(rows, frame(run.reference))
    return Analysis(rows, found, summary(rows, found))


CONTEST = ["problem_id", "scope", "cache"]
FLOATS = ["level", "low_us", "high_us", "speedup_low", "speedup_high", "t_low", "t_high"]
SUMMED = ["ran", "processes", *FLOATS, "interval", "interval_kind", "speedups", "blocks"]


class NoCrossing(StrEnum):
    """Why a contender has no break-even between the measured levels.

    BELOW  it is faster at every level: it breaks even below the first one
    ABOVE  it is slower at the last level: it breaks even above that one, or nowhere
    """

    BELOW = "below the first level"
    ABOVE = "not reached"


def summary(table: pd.DataFrame, noise: Noise | None = None) -> pd.DataFrame:
    """Return one line per case, scope and cache state: medians over its processes, and verdicts.

    speedup       Hodges-Lehmann estimate; below FEWEST processes the geometric mean
    speedup_low   and speedup_high: the interval, of the kind in `interval_kind`; `interval` is text
    t_low         and t_high: Student's 95 % interval, from FEWEST processes on
    speedups      the speed-up of each process
    processes     that its figures rest on: fewer than the run has where the baseline failed in one,
                  or a case was captured in a graph in most, and not in all
    blocks        median times by block, of each (replicate, attempt): for pairing.between
    low_us        and high_us: range of the processes' medians; of one process the quartiles
    ran           the label; of a portfolio also the kernel that it chose
    level         sparsity asked for; of weights from a file the sparsity found

    A case that is not ok in every process has the status and detail of the first process where it
    is not, and no numbers. Verdicts (verdict.py) need the noise of the run.
    """
    cases: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for line in table.to_dict("records"):
        processes = cases.setdefault((line["case_id"], line["scope"], line["cache"]), {})
        processes[line["replicate"]] = {str(name): value for name, value in line.items()}
    dropped = "replicate", "attempt", "reference", "aa_log", "blocks_us", *QUARTILES
    kept = [name for name in table.columns if name not in dropped]
    lines = [_case(list(processes.values())) for processes in cases.values()]
    types = {str(name): kind for name, kind in table.dtypes.items() if name in kept}
    summed = pd.DataFrame(lines, columns=[*kept, *SUMMED])
    return with_verdicts(summed.astype({**types, **dict.fromkeys(FLOATS, "float64")}), noise)


def winners(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest case of each problem, baselines included, and its lead; `ran` names it.

    The fastest case has the largest speed-up; without a baseline it has the least median time.
    `lead` is how many times as fast it is as the runner-up, by block and process as a speed-up is,
    and `lead_half` its uncertainty.
    `tied` says that the lead is not told from 1: its interval is not above 1; or, with fewer than
    FEWEST processes, equal kernels come out as far apart (the noise floor).
    """
    raced = cases[(cases.status == Status.OK) & ~cases.twin.astype(bool)]
    raced = raced.sort_values(["speedup", "median_us"], ascending=[False, True], kind="stable")
    ranks = raced.groupby(CONTEST, sort=False).cumcount()
    best = raced[ranks == 0].sort_index()
    second = raced[ranks == 1].set_index(CONTEST)[["ran", "blocks"]]
    second = second.reindex(pd.MultiIndex.from_frame(best[CONTEST])).set_axis(best.index)
    leads = [
        between(*pair) if isinstance(pair[1], dict) else None
        for pair in zip(best.blocks, second.blocks, strict=True)
    ]
    least: pd.Series = best.floor / np.sqrt(best.processes.astype("float64"))
    return best.drop(columns="blocks").assign(
        runner_up=second.ran,
        **_leads(leads, best),
        tied=[_tied(lead, far) for lead, far in zip(leads, least, strict=True)],
    )


def _leads(leads: list[Ratio | None], best: pd.DataFrame) -> dict[str, pd.Series]:
    ends = [(lead.value, lead.low, lead.high) if lead else (np.nan,) * 3 for lead in leads]
    found = pd.DataFrame(ends, best.index, ["lead", "low", "high"], dtype="float64")
    half = uncertainty(found.lead, found.low, found.high, best.floor, best.processes)
    return {"lead": found.lead, "lead_half": half}


def _tied(lead: Ratio | None, least: float) -> bool:
    if lead is None:
        return False
    look = lead.interval_kind != IntervalKind.CONFIDENCE
    return not lead.low > 1 or (look and lead.value <= 1 + least)


def break_even(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the sparsity from which on each contender stays faster than the baseline.

    `break_even` is interpolated between two measured levels, with log speed-up linear in log
    density, as it is if the time follows the non-zeros. Where it is NaN, `note` is a NoCrossing.
    A level at which a portfolio chose a dense kernel is not faster; after such a level `break_even`
    is the next one.
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
        lines.append(dict(zip(keys, key, strict=True)) | crossing(logs))
    return pd.DataFrame(lines, columns=[*keys, "break_even", "note", "first_level", "last_level"])


def chose_dense(cases: pd.DataFrame) -> pd.Series:
    """Say in which cases a portfolio chose a dense kernel: no win of any other format."""
    return cases.chosen.str.contains("dense, ", regex=False).astype(bool)


def _case(processes: list[dict[str, Any]]) -> dict[str, Any]:
    bad = [process for process in processes if process["status"] != Status.OK]
    used = bad or _paired(_of_one_clock(processes)) or _of_one_clock(processes)
    count = len(processes) if bad else len(used)
    case = used[0] | {"processes": count, "level": used[0]["sparsity"]}
    if not case["level"] > 0:
        case["level"] = used[0]["sparsity_achieved"]
    case["chosen"] = " or ".join(sorted({process["chosen"] for process in used} - {""}))
    case["ran"] = _ran(case["label"], case["chosen"])
    if bad:
        return case
    measured = [*TIMES, *RATES, *SENSORS]
    case |= {name: _median([process[name] for process in used]) for name in measured}
    case["samples"] = sum(process["samples"] for process in used)
    for name in ("mark", "marks"):
        found = {mark for process in used for mark in process[name].split(", ")}
        case[name] = ", ".join(sorted(found - {""}))
    return case | _interval(used)


def _ran(label: str, chosen: str) -> str:
    """Name a contender; one that chose a dense kernel by that kernel."""
    if not chosen.startswith("dense, "):
        return f"{label} (chosen: {chosen})" if chosen else label
    return f"{chosen.replace(', ', '/', 1)} (chosen by {label})"


def _paired(processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the processes with a speed-up over the most common baseline."""
    paired = [process for process in processes if not np.isnan(process["speedup"])]
    bases = Counter(process["baseline_label"] for process in paired).most_common(1)
    return [process for process in paired if process["baseline_label"] == bases[0][0]]


def _of_one_clock(processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the processes whose times are by the most common clock: a graph has no launch gap."""
    ((clock, _),) = Counter(process["clock"] for process in processes).most_common(1)
    return [process for process in processes if process["clock"] == clock]


def _interval(used: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the speed-up and the times of a case, with their intervals."""
    count, times = len(used), [process["median_us"] for process in used]
    speedups = tuple(process["speedup"] for process in used)
    logs, low_us, high_us = np.log(speedups), min(times), max(times)
    found = ratio([np.array([log]) for log in logs])
    check = np.nan, np.nan
    ends = found.low, found.high
    if count == 1:
        low_us, high_us = used[0]["q1_us"], used[0]["q3_us"]
        ends = used[0]["speedup_q1"], used[0]["speedup_q3"]
    elif found.interval_kind == IntervalKind.CONFIDENCE:
        student_s = student(logs)
        check = float(np.exp(student_s.low)), float(np.exp(student_s.high))
    names = ["speedup", "speedup_low", "speedup_high", "t_low", "t_high"]
    facts = {"low_us": low_us, "high_us": high_us, "speedups": speedups}
    facts |= {
        "interval": found.interval_kind.over(count),
        "interval_kind": str(found.interval_kind),
    }
    facts["blocks"] = {(p["replicate"], p["attempt"]): p["blocks_us"] for p in used}
    return facts | dict(zip(names, (found.value, *ends, *check), strict=True))


def _median(values: list[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return float(np.median(known)) if known else np.nan


def crossing(logs: pd.Series) -> dict[str, Any]:
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
