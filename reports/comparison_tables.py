"""The tables of a comparison: a grid of formats by devices, and every case.

    BSR, 90 %    38.2 µs 4.28× [4.22, 4.33]    34.5 µs 4.77× [4.70, 4.85]    H200 10 % shorter

A cell of a case holds the time, then the gain over the baseline of the same contest. Lines are
sorted by the difference of the times, settled ones first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.reports.grids import table as grid_table
from sparsebench.reports.tables import Cell, Table
from sparsebench.results.comparison.changes import Changes, problem_fields
from sparsebench.results.formatting import (
    CASES,
    amount,
    between,
    brackets,
    duration,
    join_words,
    kernel,
    significant,
)
from sparsebench.results.problem_names import problem_namer
from sparsebench.results.record import Status
from sparsebench.results.statistics.outcome import DIFFERENT, STYLES, Outcome
from sparsebench.results.statistics.ratio import FEWEST
from sparsebench.results.tables.contests import usual, with_shapes
from sparsebench.results.tables.frame import KEYS, records
from sparsebench.results.tables.grid import grid as grid_of

GAINS: dict[str, str] = {
    Outcome.FASTER: "gains more",
    Outcome.SLOWER: "gains less",
    Outcome.EQUAL: "gains as much",
}
"""Words for a ratio of gains, for which faster and slower would mislead."""

EVERY = "Every case"
WIDEST = 100.0  # high / low: that of two processes which scatter may span 20 powers of ten
BRACKETS_OF_MEANS = (
    "Brackets of a mean: its interval for these cases alone. They share devices and processes, so "
    "its half-width is the mean of their half-widths."
)

Line = Mapping[Any, Any]


def grid(other: Changes) -> Table:
    """Return what each format gains over dense, in the problems that it has on both devices."""
    problems = {*other.cases.problem_id}
    parts = []
    for end in (other.a, other.b):
        for number, analysis in enumerate(end.analyses):
            counted = end.cases[end.cases.run == number][KEYS]  # a case counts in one run
            timed = analysis.timed[analysis.timed.problem_id.isin(problems)]
            if len(timed):
                lines = with_shapes(usual(timed)).merge(counted, on=KEYS)
                parts.append(lines.assign(side_name=end.name, run=f"{end.name} {number}"))
    every = pd.concat(parts, ignore_index=True)
    shared = every.groupby(["problem_id", "row"]).side_name.transform("nunique") == 2
    by_format = grid_of(every[shared], "side_name")
    title = "Speedup of each format over the fastest dense contender, in all shared problems"
    return grid_table(by_format, f"{title}; ?: not settled")


def cases(others: Sequence[Changes]) -> Table:
    """Return every case: first those that broke, then by the size of the difference."""
    by_case: dict[tuple[Any, ...], dict[int, Line]] = {}
    for number, other in enumerate(others):
        for cell in records(other.cases[other.cases.word != ""].sort_values("level")):
            by_case.setdefault(tuple(cell[key] for key in KEYS), {})[number] = cell
    name, _ = _problems(pd.DataFrame([next(iter(case.values())) for case in by_case.values()]))
    columns = ["problem", "contender", others[0].a.name]
    for other in others:
        of = f" of {other.b.name}" if len(others) > 1 else ""
        columns += [other.b.name, f"time{of}", f"gain{of}", f"from{of}"]
    lines: list[list[Cell]] = []
    for case in sorted(by_case.values(), key=lambda case: -max(map(_rank, case.values()))):
        line = next(iter(case.values()))
        base = " (baseline)" if line["is_baseline"] else ""
        cells: list[Cell] = [name(line), kernel(line["label"]) + base, _time_text(line, "a")]
        for number, other in enumerate(others):
            cells += _change_cells(other, case[number]) if number in case else [""] * 4
        lines.append(cells)
    used = [n for n, head in enumerate(columns) if n < 3 or any(line[n] for line in lines)]
    return Table(
        title=f"{EVERY}, largest difference first",
        columns=[columns[n] for n in used],
        lines=[[line[n] for n in used] for line in lines],
        words={*columns[:2], *columns[4::4], *columns[5::4], *columns[6::4]},
        spare=[*columns[6::4], *columns[5::4], columns[2], *columns[3::4]],
        essential=[columns[2], *columns[3::4]],
    )


def intervals(others: Sequence[Changes]) -> list[str]:
    """Return sentences that say what the brackets of these tables and of means over cases hold."""
    lines = pd.concat([other.cases[other.cases.word != ""] for other in others])
    names = [kernel(label) for label in lines.baseline_label_a.dropna().unique()]
    baselines = amount(len(names), "kernel") if len(names) > CASES else join_words(names)
    gain = f"A speedup after a time is over the baseline of the same contest ({baselines})"
    held = brackets([*lines.interval_a, *lines.interval_b])
    return [
        "Brackets: the 95 % interval of the difference. Runs share no process, so it also includes "
        "what differs between devices, days and versions of the harness. If a side has fewer than "
        f"{FEWEST} processes, it is at least as wide as the tolerance within which equal cases of "
        "published runs stay.",
        "; ".join(filter(None, [f"{gain}, on the same device", held])) + ".",
        BRACKETS_OF_MEANS,
    ]


def problems(others: Sequence[Changes]) -> str:
    """Return what the names of problems leave out: the fields with one value in each op."""
    return _problems(pd.concat([other.cases[other.cases.word != ""] for other in others]))[1]


def _problems(lines: pd.DataFrame) -> tuple[Callable[[Line], str], str]:
    """Return a function that names the problem of a line, and the text that all lines share."""
    names = [name for name in [*problem_fields(lines), "scope", "cache"] if name in lines]
    return problem_namer(lines, names)


def _change_cells(other: Changes, line: Line) -> list[Cell]:
    word = line["word"]
    text = _time(other, word, line["time"], line["time_low"], line["time_high"])
    cause = ": ".join(filter(None, [line["cause"], line["why"]]))
    gain = GAINS.get(line["gain"], str(line["gain"]))
    return [_time_text(line, "b"), (text, _style(word)), gain, cause]


def _time(other: Changes, word: str, ratio: float, low: float, high: float) -> str:
    """Write `H200 10 % shorter [9, 11]`; `ratio` is a's time over b's, with its interval."""
    if word == Outcome.NOT_MEASURED:
        return word
    if word not in DIFFERENT:
        if high > WIDEST * low:
            return f"{word} (too few processes)"
        span = f"{significant(100 / high, 3)} to {significant(100 / low, 3)} %"
        return f"{word} ({other.b.name} takes {span})"
    name = other.b.name if ratio > 1 else other.a.name
    ends = (1 / low, 1 / high) if ratio > 1 else (high, low)
    saved, least, most = (
        significant(100 * (1 - each), 2) for each in (min(ratio, 1 / ratio), *ends)
    )
    return f"{name} {saved} % shorter [{least}, {most}]"


def _time_text(line: Line, end: str) -> str:
    """Write a time and the gain over the baseline of the contest: `38.2 µs 4.28× [4.22, 4.33]`."""
    if line[f"status_{end}"] != Status.OK:
        return "–"
    time = duration(line[f"median_us_{end}"])
    names = "speedup", "speedup_low", "speedup_high", "uncertainty"
    gain = [line[f"{name}_{end}"] for name in names]
    return time if line["is_baseline"] or pd.isna(gain[0]) else f"{time} {between(*gain)}"


def _rank(line: Line) -> float:
    """Return the sort key of a case: broken, then settled, then open, then not measured."""
    if line["word"] == Outcome.NOT_MEASURED:
        return 2e3 if line["broken"] else -1.0
    return _size(line["word"], line["time"])


def _size(word: str, ratio: float) -> float:
    size = 0.0 if np.isnan(ratio) else abs(float(np.log(ratio)))
    return size + (1e3 if word in DIFFERENT else 0.0)


def _style(word: str) -> str:
    return STYLES[Outcome(word)] if word else ""
