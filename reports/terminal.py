"""The answer of a run on a terminal: who wins each problem, and where each format breaks even.

Every interval has its outcome beside it. Below the tables are the noise floor of the run, and
whether its A/A pairs make it reliable. Fewer than FEWEST processes give a look, and it says so.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from sparsebench.results.analysis import Analysis
from sparsebench.results.compare import Comparison
from sparsebench.results.frame import fields
from sparsebench.results.noise import Noise
from sparsebench.results.record import Status
from sparsebench.results.statistics import FEWEST
from sparsebench.results.summary import break_even, winners

WORDS = ["fastest", "contender", "baseline", "op", "pattern", "dtype", "source"]
WORDS += ["outcome", "outcome a", "outcome b"]
VERDICT = 8  # processes that are advised for a verdict; FEWEST is the least


def answer(found: Analysis) -> Group:
    """Return the tables that `sparsebench run` ends with."""
    cases = _by_size(found.cases)
    if not (cases.status == Status.OK).any():
        return Group("nothing was measured: the report says why")
    even = break_even(cases)
    tables = [_fastest(cases), *([] if even.empty else [_crossings(even)])]
    return Group(*tables, *_trust(cases, found.noise))


def counted(found: Analysis) -> dict[str, int]:
    """Count the suite's cases by status; `ok` means ok in every process, scope and cache state."""
    cases = _by_size(found.cases)
    asked = cases[~cases.twin.astype(bool)]
    worst_first = asked.sort_values("status", key=lambda status: status == Status.OK)
    statuses = worst_first.drop_duplicates("case_id").status.value_counts()
    return {str(status): int(count) for status, count in statuses.items()}


def answer_json(found: Analysis) -> dict[str, Any]:
    """Return the answer for a script."""
    cases = _by_size(found.cases)
    tables = {"winners": winners(cases), "break_even": break_even(cases)}
    said = {name: json.loads(table.to_json(orient="records")) for name, table in tables.items()}
    word, why = found.noise.reliability
    floors = {"noise_floor": found.noise.floors}
    return said | floors | {"reliability": word, "reliability_why": why}


def comparison(found: Comparison) -> Group:
    """Return two runs side by side, and how many of their cases agree."""
    names = [name for name in found.cases.columns if name not in ("op", "level", "format")]
    columns, constant = _split(found.cases, names[names.index("cache") + 1 : names.index("kernel")])
    table = _table(
        f"a: {found.name_a}   b: {found.name_b}   ({constant})",
        [
            *columns,
            "contender",
            "µs a",
            "µs b",
            "b / a",
            "x baseline a",
            "x baseline b",
            "outcome a",
            "outcome b",
            "agree",
        ],
    )
    for line in found.cases.to_dict("records"):
        numbers = "median_us_a", "median_us_b", "time_b_over_a", "speedup_a", "speedup_b"
        table.add_row(
            *(_shown(line[name]) for name in columns),
            escape(line["label"]),
            *(_number(line[name]) for name in numbers),
            *(_said(line[name]) for name in ("outcome_a", "outcome_b")),
            "-" if pd.isna(line["agree"]) else "yes" if line["agree"] else "no",
        )
    agree = f"{found.cases.agree.sum()} of {found.cases.agree.count()} comparable cases agree"
    only = f"only in a: {len(found.only_a)} cases; only in b: {len(found.only_b)} cases"
    return Group(table, agree, only)


def _by_size(cases: pd.DataFrame) -> pd.DataFrame:
    """Sort cases by the fields of their problems: a run takes them in a random order."""
    names = ["op", *fields(cases), "source"]
    return cases.sort_values(names, key=_sizes, kind="stable", ignore_index=True)


def _sizes(column: pd.Series) -> pd.Series:
    """Return what to sort a column by: its numbers where it has any, else its text."""
    numbers = pd.to_numeric(column, errors="coerce")
    return numbers if numbers.notna().any() else column.astype(str)


def _fastest(cases: pd.DataFrame) -> Table:
    """Return the fastest case of each problem, with the interval and outcome of its speed-up."""
    best = winners(cases)
    interval = " and ".join(sorted({str(i) for i in cases.interval.dropna()}))
    columns, constant = _split(best, ["op", *fields(best), "source", "scope", "cache"])
    table = _table(
        f"Fastest, by problem ({constant}; interval: {interval})",
        [*columns, "fastest", "µs", "x baseline", "interval", "outcome"],
    )
    for line in best.to_dict("records"):
        tied = f" (tied with {line['runner_up']})" if line["tied"] else ""
        table.add_row(
            *(_shown(line[name]) for name in columns),
            escape(f"{line['ran']}{tied}{_accuracy(line)}"),
            _number(line["median_us"]),
            _number(line["speedup"]),
            f"{_number(line['speedup_low'])} to {_number(line['speedup_high'])}",
            _outcome(line),
        )
    return table


def _crossings(even: pd.DataFrame) -> Table:
    names = list(even.columns)
    columns, _ = _split(even, names[names.index("op") : names.index("format")])
    title = "Break-even: faster than the baseline from this sparsity on"
    table = _table(title, [*columns, "contender", "baseline", "level"])
    for line in even.to_dict("records"):
        level = line["note"] or f"{100 * line['break_even']:.0f} %"
        raced = escape(line["label"]), escape(line["baseline_label"])
        table.add_row(*(_shown(line[name]) for name in columns), *raced, level)
    return table


def _trust(cases: pd.DataFrame, noise: Noise) -> list[str]:
    """Return sentences on how far the numbers can be trusted."""
    lines = [noise.sentence, noise.reliability[1]]
    if (cases.processes < FEWEST).all():
        few = f"Fewer than {FEWEST} processes give a look, not a verdict"
        lines.append(f"{few}: --replicates {VERDICT} gives one.")
    accuracy = cases.marks[cases.marks.fillna("") != ""].value_counts()
    marks = cases.mark[cases.mark.fillna("") != ""].value_counts()
    return [
        *lines,
        *(f"{n} cases are marked: {mark} when they were timed." for mark, n in marks.items()),
        *(f"{n} cases are marked for their accuracy: {mark}." for mark, n in accuracy.items()),
    ]


def _accuracy(line: Mapping[Any, Any]) -> str:
    """Write what is unusual about the output of a right case, or nothing."""
    return f" [{line['marks']}]" if line["marks"] else ""


def _outcome(line: Mapping[Any, Any]) -> str:
    """Write `faster`, `no difference`, `inconclusive (+3 more processes)`, or a dash for none."""
    more, words = line["more_processes"], _said(line["outcome"])
    return words if pd.isna(more) else f"{words} (+{more} more processes)"


def _said(outcome: str) -> str:
    return outcome.replace("_", " ") or "-"


def _split(table: pd.DataFrame, names: Sequence[str]) -> tuple[list[str], str]:
    """Return the fields that vary, for columns, and the constant ones as text."""
    values = {name: table[name].astype(str).unique() for name in names if name in table}
    varying = [name for name, found in values.items() if len(found) > 1]
    fixed = [(n, found[0]) for n, found in values.items() if len(found) == 1]
    known = [(n, str(v)) for n, v in fixed if str(v) not in ("<NA>", "nan", "None", "")]
    return varying, " ".join(f"{name}={escape(value)}" for name, value in known)


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for name in columns:
        words = name in WORDS
        table.add_column(name, justify="left" if words else "right", no_wrap=not words)
    return table


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return _number(value)
    return "-" if value is pd.NA else escape(str(value).rpartition("/")[2])


def _number(value: float) -> str:
    return "-" if pd.isna(value) else f"{value:.4g}"
