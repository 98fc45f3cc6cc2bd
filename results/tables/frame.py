"""Rows as a table, one line per row. Everything derived from samples is computed on reading.

The contenders of a contest are timed in turn, in rounds of a few samples each:

    A  baseline      speedup of B = exp(median over rounds of log(A_i / B_i))
    B  contender
    b  its twin      A/A log       =     median over rounds of log(B_i / b_i)

where A_i is the median time of round i. Both were taken within moments of each other, so a
drifting clock affects both. A slow contender has fewer rounds; they are paired with the first ones
of the baseline. Rows are from one contest if they share problem, process, attempt, scope and cache
state.

The baseline multiplies unpruned weights if the contest has such a contender: it is the layer that a
sparse one replaces. `same_zeros` is then over the one with pruned weights; else it is `speedup`.

A run with --energy also has the time, energy and clock of a call under two loads (UNDER_LOAD,
harness/bench/energy.py). `limited` is the share of the contest's time in which power or heat
lowered the clock.

`of_bound` is the hardware limit divided by the median time, at most 1: ceilings are measured, so a
time may be up to 5 % below the limit (ceilings.py). On a CPU no limit is known; rows of versions up
to 0.4 have one, which is left out.

A row is marked, never dropped, if its contest was throttled or power-limited, if the host was late
for some of its samples, if its error or bias is unusual (see harness/bench), if only its suite
allows its error, or if memory sufficed for the right answer of a part alone. Rows of versions up
to 0.2.0 do not say whether the host was late. They are marked if their median exceeds LATE times
the tenth percentile, and `late` is then the share of samples above that.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sparsebench._writing import write_file
from sparsebench.results.record import POWER_LIMITED, Case, Contender, Row, Status, Value
from sparsebench.results.statistics.ratio import Floats, median_logs, medians_by_round, quantiles

# Columns: these, then the fields of the problems, then MEASURED.
NAMES = ["problem_id", "case_id", "op", "seed", "source"]
FIELDS = ["m", "n", "k", "dtype", "pattern", "sparsity", "block"]  # an op may have others
CONTENDER = ["format", "kernel", "label", "params", "options", "weights", "baseline", "twin"]
KEYS = ["case_id", "scope", "cache"]  # identify a line in a table of cases
PLACE = ["replicate", "attempt", "reference", "device", "scope", "cache", "clock"]
RESULT = ["status", "detail", "choice", "chosen", "digest", "code", "bound_by"]
SIZES = ["nnz", "stored_bytes", "dense_bytes", "held_bytes", "peak_bytes"]
ERRORS = ["error", "error_of_bound", "usual_error", "bias", "usual_bias"]
SHARES = ["sparsity_achieved", "bytes_of_dense", "error_of_usual"]
SAMPLE_TIMES = ["median_us", "q1_us", "q3_us", "min_us"]
OTHER_TIMES = ["convert_us", "prepare_s"]
TIMES = [*SAMPLE_TIMES, *OTHER_TIMES, "bound_us"]
RATES = ["tflops", "dense_tflops", "gb_per_s", "of_bound"]
TELEMETRY = ["sm_mhz", "power_w", "temperature_c"]
LIMITS = ["power_capped_us", "thermal_us", "hardware_us"]  # counters of NVML
SENSORS = ["energy_j", *TELEMETRY, "limited"]
LOADS = "half", "full"
OF_LOAD = {"us": "us_per_call", "j": "j_per_call", "mhz": "sm_mhz"}
UNDER_LOAD = [f"{load}_{name}" for load in LOADS for name in (*OF_LOAD, "speedup")]
QUARTILES = ["speedup_q1", "speedup_q3"]
SHARES_OF_SAMPLES = [0.0, 0.1, 0.25, 0.5, 0.75]
LATE, HOST_LATE = 1.3, "host late"
OF_ONE_LAYER = {"serving"}  # ops whose rows count the bytes of one layer and of the embeddings
MARKS = {
    "power-limited": "In at least one process, NVML counted that the power limit lowered the SM "
    f"clock for more than {100 * POWER_LIMITED:g} % of the time of the contest, checks included. "
    "The counter does not say by how much. The SM clock is the median while the GPU ran, and rows "
    "also have the lowest (`sm_mhz_min`). The power in W is a mean over the same time, pauses "
    "included, so it can be far below the limit.",
    "thermal": "In at least one process, NVML counted that heat lowered the SM clock.",
    "hardware slowdown": "In at least one process, NVML counted that the hardware itself lowered "
    "the clocks, because of heat or its power brake.",
    HOST_LATE: "For some samples the GPU waited for the host.",
}
"""What the marks of a contest mean; all its contenders, dense ones included, share a clock."""
COUNTS = [*SIZES, "samples"]
NUMBERS = [*ERRORS, *SHARES, *TIMES, *RATES, *SENSORS, "speedup", *QUARTILES]
NUMBERS += ["same_zeros", *UNDER_LOAD, "aa_log", "late"]
MEASURED = [*CONTENDER, *PLACE, *RESULT, "mark", "marks", *COUNTS, *NUMBERS, "values"]
MEASURED += ["baseline_label", "baseline_weights", "blocks_us"]
AS_IN_ROW = [*PLACE, *RESULT, *SIZES, *ERRORS, *OTHER_TIMES, "energy_j"]  # copied, not computed

UNUSUAL = 1.5  # an error above this multiple of the usual one is marked
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet executes cells that begin with these


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Return one line per row, in order. Column names include units; unknown values are NaN/NA.

    `source` is the shortest ending of a file's path and tensor that no other source has.
    """
    rows = list(rows)
    sources = shortest_endings({s.label for row in rows if (s := row.case.problem.source)})
    problems = [row.case.problem.id for row in rows]
    label, others = _labels(problems, rows), opponents(rows, problems)
    samples_us = [np.array(row.samples_us) for row in rows]
    medians_us = medians_by_round(samples_us, [row.samples_per_block for row in rows])
    blocks_us = {id(row): us for row, us in zip(rows, medians_us, strict=True) if us.size}

    def logs(row: Row, other: Row | None) -> Sequence[float] | Floats:
        if other is None or row.status is not Status.OK:
            return ()
        return median_logs(blocks_us[id(other)], blocks_us[id(row)])

    times_us = quantiles(samples_us, SHARES_OF_SAMPLES)
    pairs = [*zip(rows, others, strict=True)]
    speedups = np.exp(quantiles([logs(row, of.base) for row, of in pairs], [0.5, 0.25, 0.75]))
    has_one = [of.base is of.same_zeros for of in others]
    ratios = [
        () if one else logs(row, of.same_zeros)
        for one, (row, of) in zip(has_one, pairs, strict=True)
    ]
    same_zeros = np.where(has_one, speedups[:, 0], np.exp(quantiles(ratios, [0.5]))[:, 0])
    numbers = times_us.tolist(), speedups.tolist(), same_zeros.tolist()
    cases = {id(row.case): row.case for row in rows}  # rows of one case share it
    facts = {key: _case_facts(case, sources) for key, case in cases.items()}
    lines = [
        {
            "problem_id": problem,
            "label": label(row.case.contender),
            **facts[id(row.case)],
            **_measurements(row, of_samples),
            "blocks_us": blocks_us.get(id(row)),
            **dict(zip(["speedup", *QUARTILES], of_speedup, strict=True)),
            "same_zeros": over_zeros,
            **_under_load(row, of.base),
            "baseline_label": label(of.base.case.contender) if of.base else np.nan,
            "baseline_weights": of.base.case.contender.weights if of.base else "",
            "aa_log": np.median(log_ratios) if len(log_ratios := logs(row, of.pair)) else np.nan,
        }
        for problem, row, of, of_samples, of_speedup, over_zeros in zip(
            problems, rows, others, *numbers, strict=True
        )
    ]
    names = list(dict.fromkeys([*FIELDS, *(n for row in rows for n in row.case.problem.fields)]))
    whole = [name for name in names if all(type(line.get(name, 0)) is int for line in lines)]
    types = dict.fromkeys([*whole, *COUNTS], "Int64") | dict.fromkeys(NUMBERS, "float64")
    return table_of(lines, [*NAMES, *names, *MEASURED], types | {"sparsity": "float64"})


def table_of(
    lines: Sequence[Mapping[str, Any]], columns: Iterable[str], types: Mapping[str, Any]
) -> pd.DataFrame:
    """Return lines as a table with these columns; a missing value is NaN.

    Arrays, and series that share an index, take a third of the time of series with one each.
    Texts are Python objects, and Arrow's in an array, whose lines took half the time of a report.
    """
    values = {name: [line.get(name, np.nan) for line in lines] for name in columns}
    dtypes = {n: object for n, column in values.items() if str in {*map(type, column)}} | {**types}
    index, texts = pd.RangeIndex(len(lines)), [n for n in values if dtypes.get(n) in (None, object)]
    series = {n: pd.Series(values[n], index, dtypes.get(n)) for n in texts}
    arrays = {n: pd.array(v, dtype=dtypes[n]) for n, v in values.items() if n not in series}
    return pd.DataFrame({**values, **series, **arrays}, index)


def with_objects(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with its texts as Python objects, as those of `table_of` are."""
    return table.astype(dict.fromkeys(map(str, table.select_dtypes("str")), object)).copy()


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the lines of a table; table.to_dict("records") takes five times as long.

    An unknown whole number is NA, which to_dict makes None.
    """
    names = [str(name) for name in table.columns]
    columns = (table[name].tolist() for name in names)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def fields(table: pd.DataFrame) -> list[str]:
    """Return the columns of a frame or a summary that are fields of its problems."""
    names = list(table.columns)
    return names[names.index("source") + 1 : names.index("format")]


def to_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV, without the times of single rounds."""
    write_file(path, as_csv(table.drop(columns="blocks_us", errors="ignore")))


def as_csv(table: pd.DataFrame) -> str:
    """Return a table as CSV, safe for spreadsheets, which execute a cell that begins with =.

    Such cells get a leading apostrophe, as OWASP advises (CSV Injection).
    """
    safe = table.copy(deep=False)
    for name in table.columns:
        if not pd.api.types.is_numeric_dtype(table[name]):
            safe[name] = table[name].map(_plain_text)
    return str(safe.rename(columns=_plain_text).to_csv(index=False))


def _plain_text(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _labels(problems: list[str], rows: list[Row]) -> Callable[[Contender], str]:
    """Return a function from contender to label, with parameters if labels are not unique."""
    seen: dict[tuple[str, str], set[str]] = {}
    for problem, row in zip(problems, rows, strict=True):
        contender = row.case.contender
        seen.setdefault((problem, contender.label), set()).add(_text(contender.params))
    shared = {label for (_, label), params in seen.items() if len(params) > 1}

    def label(contender: Contender) -> str:
        params = f" {_text(contender.params)}" if contender.label in shared else ""
        return contender.label + params.rstrip()

    return label


def shortest_endings(labels: Collection[str]) -> dict[str, str]:
    """Return the shortest ending of each label that no other one has: `layer_0/kernel`."""
    endings = {
        label: ["/".join(words[-n:]) for n in range(1, len(words) + 1)]
        for label in labels
        for words in [label.split("/")]
    }
    counts = Counter(ending for each in endings.values() for ending in each)
    return {
        label: next((ending for ending in each if counts[ending] == 1), label)
        for label, each in endings.items()
    }


def _case_facts(case: Case, sources: Mapping[str, str]) -> dict[str, Any]:
    problem, contender = case.problem, case.contender
    values = {name: _plain(value) for name, value in problem.fields.items()}
    return values | {
        "block": str(values.get("block", "")),
        "case_id": case.id,
        "op": problem.op,
        "seed": problem.seed,
        "source": sources[problem.source.label] if problem.source else None,
        "format": contender.format,
        "kernel": contender.kernel,
        "params": _text(contender.params),
        "options": _text(contender.options),
        "weights": contender.weights,
        "baseline": contender.baseline,
        "twin": contender.twin,
    }


def _measurements(row: Row, of_samples: Sequence[float]) -> dict[str, Any]:
    """Return the measured columns; `of_samples` are the quantiles SHARES_OF_SAMPLES."""
    least, low, q1, median, q3 = of_samples
    late, has_bytes = _late_share(row, low, median), row.case.problem.op not in OF_ONE_LAYER
    bound_us, bound_by = (row.bound_us, row.bound_by) if row.clock != "host" else (None, None)
    share = _ratio(bound_us, median)
    return {name: getattr(row, name) for name in AS_IN_ROW} | {
        "status": str(row.status),
        "choice": json.dumps(row.choice),
        "mark": _mark(row.telemetry, late),
        "late": late,
        "marks": _marks(row),
        "values": _values(row.values),
        "samples": len(row.samples_us),
        "sparsity_achieved": row.sparsity,
        "bytes_of_dense": _ratio(row.stored_bytes, row.dense_bytes) if has_bytes else None,
        "median_us": median,
        "q1_us": q1,
        "q3_us": q3,
        "min_us": least,
        "tflops": _ratio(row.flops, median * 1e6),
        "dense_tflops": _ratio(row.dense_flops, median * 1e6),
        "gb_per_s": _ratio(row.fewest_bytes, median * 1e3),
        "bound_us": bound_us,
        "bound_by": bound_by,
        "of_bound": share and min(1.0, share),
        "error_of_usual": _ratio(row.error, row.usual_error),
        **{name: row.telemetry.get(name) for name in TELEMETRY},
        "limited": _limited_share(row.telemetry),
    }


def _limited_share(telemetry: Mapping[str, float]) -> float | None:
    """Return the share of a contest's time in which the board lowered its clock, if known."""
    held_us = [telemetry[name] for name in LIMITS if name in telemetry]
    return _ratio(max(held_us, default=None), 1e6 * telemetry.get("seconds", 0.0))


def _late_share(row: Row, low_us: float, median_us: float) -> float | None:
    """Return the share of samples for which the host was late; None if that is unknown."""
    if row.late is not None or row.clock not in ("graph", "events") or row.scope == "op":
        return row.late
    if not row.samples_us:
        return None
    apart = median_us > LATE * low_us
    return float(np.mean(np.array(row.samples_us) > LATE * low_us)) if apart else 0.0


def _mark(telemetry: Mapping[str, float], late: float | None) -> str:
    """List the causes of longer times, by NVML's counters and the clock; "" if none."""
    window_us = 1e6 * telemetry.get("seconds", np.nan)
    causes = [
        telemetry.get("power_capped_us", 0) > POWER_LIMITED * window_us,
        telemetry.get("thermal_us", 0) > 0,
        telemetry.get("hardware_us", 0) > 0,
        bool(late),
    ]
    return ", ".join(name for name, marked in zip(MARKS, causes, strict=True) if marked)


def _marks(row: Row) -> str:
    """List what is unusual about a correct output; "" if nothing is, or if it is unknown."""
    marks = {
        "unusual error": (row.error or 0.0) > UNUSUAL * (row.usual_error or math.inf),
        "bias": abs(row.bias or 0.0) > (row.usual_bias or math.inf),
        "larger error allowed": row.case.contender.error is not None,
        "check of a part": bool(row.judged_part),
    }
    return ", ".join(name for name, marked in marks.items() if marked)


def _under_load(row: Row, base: Row | None) -> dict[str, float | None]:
    """Return UNDER_LOAD: a call under each load, and its speedup over the baseline's call there."""
    facts: dict[str, float | None] = {}
    for load in LOADS:
        of = row.loads.get(load, {})
        facts |= {f"{load}_{name}": of.get(field) for name, field in OF_LOAD.items()}
        of_base = base.loads.get(load, {}) if base else {}
        facts[f"{load}_speedup"] = _ratio(of_base.get("us_per_call"), of.get("us_per_call"))
    return facts


def _values(by_operand: Mapping[str, str]) -> str:
    """Name the operands of each distribution: `w, x normal`; "" in rows up to 0.4."""
    alike: dict[str, list[str]] = {}
    for operand, distribution in by_operand.items():
        alike.setdefault(distribution, []).append(operand)
    return "; ".join(f"{', '.join(names)} {word}" for word, names in alike.items())


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def _text(values: Mapping[str, Value]) -> str:
    return " ".join(f"{name}={_plain(value)}" for name, value in sorted(values.items()))


def _plain(value: Value) -> bool | int | float | str | None:
    """Write a list as text, and a square block as its side: 16x32 for [16, 32], 16 for [16, 16]."""
    if not isinstance(value, list):
        return value
    return "x".join(map(str, value if len(set(value)) > 1 else value[:1]))


class Opponents(NamedTuple):
    """The rows of a contest that a row is compared with; None if there is no such row.

    base        the first ok baseline row, of those with unpruned weights if there is one
    same_zeros  the first ok baseline row with pruned weights
    pair        of a twin: the first ok row of the same format, kernel, parameters, options, weights
    """

    base: Row | None
    same_zeros: Row | None
    pair: Row | None


def opponents(rows: Sequence[Row], problems: Sequence[str]) -> list[Opponents]:
    """Return what each row is compared with; `problems` are the ids of the rows' problems."""
    baselines: dict[Hashable, Row] = {}
    originals: dict[Hashable, Row] = {}
    contests = [
        (problem, row.reference, row.replicate, row.attempt, row.scope, row.cache)
        for problem, row in zip(problems, rows, strict=True)
    ]
    for contest, row in zip(contests, rows, strict=True):
        contender = row.case.contender
        if row.status is Status.OK and contender.baseline:
            baselines.setdefault((contest, contender.weights), row)
        if row.status is Status.OK and not contender.twin:
            originals.setdefault((contest, _recipe(contender)), row)
    opposed: list[Opponents] = []
    for contest, row in zip(contests, rows, strict=True):
        contender, same_zeros = row.case.contender, baselines.get((contest, "pruned"))
        base = baselines.get((contest, "original"), same_zeros)
        pair = originals.get((contest, _recipe(contender))) if contender.twin else None
        opposed.append(Opponents(base, same_zeros, pair))
    return opposed


def _recipe(contender: Contender) -> Hashable:
    """Return what the two halves of an A/A pair share."""
    texts = (str(sorted(each.items())) for each in (contender.params, contender.options))
    return contender.format, contender.kernel, contender.weights, *texts
