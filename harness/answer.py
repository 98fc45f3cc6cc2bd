"""The answer of a run for a terminal: who wins each problem, and where each format breaks even."""

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from sparsebench.results.compare import Comparison
from sparsebench.results.frame import fields, frame
from sparsebench.results.store import Run
from sparsebench.results.summary import break_even, summary, winners

WORDS = "fastest", "contender", "baseline", "pattern", "dtype", "source"


def answer(run: Run) -> Group:
    """Return the tables that `sparsebench run` ends with."""
    cases = summary(frame(run.rows))
    if not (cases.status == "ok").any():
        return Group("nothing was measured: the report says why")
    best, even = winners(cases), break_even(cases)
    interval = " and ".join(sorted({str(i) for i in cases.interval.dropna()}))
    columns, constant = _split(best, [*fields(best), "source"])
    ranged = f"range: {interval}"
    fastest = _table(
        f"Fastest, by problem ({constant}; {ranged})",
        [*columns, "fastest", "µs", "x baseline", "range"],
    )
    for line in best.to_dict("records"):
        tied = f" ({line['runner_up']} within range)" if line["tied"] else ""
        fastest.add_row(
            *(_shown(line[name]) for name in columns),
            escape(f"{line['label']}{tied}"),
            _number(line["median_us"]),
            _number(line["speedup"]),
            f"{_number(line['speedup_low'])} to {_number(line['speedup_high'])}",
        )
    if even.empty:
        return Group(fastest)
    columns, _ = _split(even, [name for name in fields(cases) if name != "sparsity"])
    title = "Break-even: faster than the baseline from this sparsity on"
    crossings = _table(title, [*columns, "contender", "baseline", "level"])
    for line in even.to_dict("records"):
        level = line["note"] or f"{100 * line['break_even']:.0f} %"
        names = escape(line["label"]), escape(line["baseline_label"])
        crossings.add_row(*(_shown(line[name]) for name in columns), *names, level)
    return Group(fastest, crossings)


def answer_json(run: Run) -> dict[str, Any]:
    """Return the same for a script."""
    cases = summary(frame(run.rows))
    tables = {"winners": winners(cases), "break_even": break_even(cases)}
    return {name: json.loads(table.to_json(orient="records")) for name, table in tables.items()}


def comparison(found: Comparison) -> Group:
    """Return two runs side by side."""
    names = [name for name in found.cases.columns if name not in ("op", "level", "format")]
    columns, constant = _split(found.cases, names[names.index("cache") + 1 : names.index("kernel")])
    table = _table(
        f"a: {found.name_a}   b: {found.name_b}   ({constant})",
        [*columns, "contender", "µs a", "µs b", "b / a", "x baseline a", "x baseline b"],
    )
    for line in found.cases.to_dict("records"):
        numbers = "median_us_a", "median_us_b", "time_b_over_a", "speedup_a", "speedup_b"
        table.add_row(
            *(_shown(line[name]) for name in columns),
            escape(line["label"]),
            *(_number(line[name]) for name in numbers),
        )
    only = f"only in a: {len(found.only_a)} cases; only in b: {len(found.only_b)} cases"
    return Group(table, only)


def _split(table: pd.DataFrame, names: Sequence[str]) -> tuple[list[str], str]:
    """Return the fields that vary, for columns, and those that do not, as text."""
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
