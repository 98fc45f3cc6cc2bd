"""Every case in one table that sorts and filters, and the same data as CSV."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._again import selected_fields, suite_name
from sparsebench.reports.figures._html import NOTHING, download, note
from sparsebench.reports.tables import html_table, without_dashes
from sparsebench.results.formatting import (
    between,
    brackets,
    capital,
    join_words,
    kernel,
    percent,
    plain,
    significant,
    times,
)
from sparsebench.results.problem_names import problem_name
from sparsebench.results.record import UNPRUNED
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.frame import fields, records

TITLE = "Every case"
ORDER = 100

TIME = ["median_us", "low_us", "high_us"]
SPEEDUP = ["label", "baseline_label", "speedup", "speedup_low", "speedup_high", "uncertainty"]
SPEEDUP += ["same_zeros", "baseline_weights"]
LONG = {"version", "chosen"}  # parts of a choice that other columns show


def draw(analysis: Analysis) -> Markup:
    """Show one line per case. The page also holds the whole summary as CSV."""
    cases = analysis.cases
    if cases.empty:
        return NOTHING
    names = [name for name in fields(cases) if name != "sparsity" and cases[name].notna().any()]
    names = ["op", *names, "values", "source", "seed", "scope", "cache"]
    names = [n for n in names if cases[n].nunique(dropna=False) > 1]
    heads = [f">{n}" if pd.api.types.is_numeric_dtype(cases[n]) else n for n in names]
    written = cases.assign(
        time=[_time(*ends) for ends in cases[TIME].itertuples(index=False)],
        gain=[_speedup(line) for line in cases[SPEEDUP].itertuples()],
        over_zeros=[_over_zeros(line) for line in cases[SPEEDUP].itertuples()],
        configuration=cases.choice.map(configuration),
        outcome=[_outcome(line) for line in records(cases)],
    )
    shown = [column for column in COLUMNS if column[1] in written]
    heads += [head for head, _, _ in shown]
    columns = [[_text(value) for value in written[name]] for name in names]
    columns += [[write(value) for value in written[name]] for _, name, write in shown]
    lines = [list(line) for line in zip(*columns, strict=True)]
    same = ["op", *fields(cases), "values", "source", "scope", "cache"]
    same = [n for n in same if n not in [*names, "sparsity"]]
    constant = {n: _text(cases[n].iloc[0]) for n in same if pd.notna(cases[n].iloc[0])}
    run = {
        "suite": suite_name(analysis.run),
        "same": constant,
        "select": selected_fields(analysis.run, cases),
        "fields": ["op", *fields(cases)],
    }
    held = f" {_spans(cases)} {capital(brackets(cases.interval))}." if len(analysis.timed) else ""
    bases = {kernel(label).removesuffix(UNPRUNED) for label in cases.baseline_label.dropna()}
    held += BASES.format(join_words(sorted(bases))) if bases else ""
    whole = Markup("All columns of these {} lines as CSV: {}.")
    return (
        note(whole.format(len(cases), download("cases", cases)) + held)
        + Markup(TOOL).format(problem_name(dict(cases.iloc[0]), same), json.dumps(run))
        + html_table(*without_dashes(heads, lines), "sortable", _ids(cases))
    )


def _outcome(line: Mapping[Any, Any]) -> str:
    """Write `faster`, `equal`, `not settled (+3)` for 3 more processes, or a dash."""
    more, word = line["more_processes"], line["outcome"] or "–"
    return word if pd.isna(more) else f"{word} (+{more})"


def _speedup(line: Any) -> str:
    """Write the speedup of a case with its interval; 1 for the baseline itself."""
    if line.label == line.baseline_label:
        return "1"
    return between(line.speedup, line.speedup_low, line.speedup_high, line.uncertainty)


def _over_zeros(line: Any) -> str:
    """Write the speedup over dense on the same zeros, if the baseline has unpruned weights."""
    if line.baseline_weights != "original":
        return ""
    return times(line.same_zeros, line.same_zeros * line.uncertainty / line.speedup)


def _spans(cases: pd.DataFrame) -> str:
    """Return a sentence that says what the intervals of times hold."""
    single = cases[cases.median_us.notna()].processes == 1
    names = ["range over processes"] * bool((~single).any())
    names += ["quartiles of the samples in one process"] * bool(single.any())
    return f"Intervals of times: {' or '.join(names)}."


def configuration(choice: str) -> str:
    """Write the choice of a kernel in the first process: `tokens 128, cluster 1, by search`."""
    chosen = json.loads(choice) if choice else {}
    parts = (f"{name} {value}" for name, value in chosen.items() if name not in LONG)
    return ", ".join(part for part in parts if "{" not in part)


def _time(median: float, low: float, high: float) -> str:
    """Write a time with its range: `29.5 [29.4, 29.6]`."""
    span = f" [{significant(low)}, {significant(high)}]" if high > low else ""
    return significant(median) + span


def _ids(cases: pd.DataFrame) -> list[str]:
    """Return an id per line: its case, with a number for a second and later measure of it."""
    later = cases.groupby("case_id").cumcount()
    numbers = zip(cases.case_id, later, strict=True)
    return [f"case-{case}-{count}" if count else f"case-{case}" for case, count in numbers]


def _text(value: Any) -> str:
    return "–" if pd.isna(value) or value == "" else plain(value)


def _rate(q: float) -> str:
    return "–" if pd.isna(q) else f"{q:.1g}"


def _code(text: str) -> Markup:
    return Markup("<code>{}</code>").format(text)


BASES = " Speedups here: over {}, the suite's first baseline; in grids: over the fastest dense one."
TOOL = (
    '<p class="note">The same in every line: {}. Type words to find the lines that contain all of '
    "them. m:16, speedup:&gt;2 and time:10..50 search a single column, as the fields below the "
    "heads do.</p>"
    '<form class="filter" data-run="{}"><input type="search" name="q" aria-label="find lines" '
    'placeholder="e.g. bsr ok speedup:&gt;2"> <output></output> '
    '<button type="reset">show all</button></form>'
)
COLUMNS: list[tuple[str, str, Callable[[Any], str]]] = [  # head, column, format of its values
    (">sparsity", "level", percent),
    ("contender", "label", _text),
    ("chosen", "chosen", _text),
    ("status", "status", lambda status: status.replace("_", " ")),
    (">time, µs", "time", _text),
    (">speedup", "gain", _text),
    (">over the same zeros", "over_zeros", _text),
    ("outcome", "outcome", _text),
    (">q", "q", _rate),
    (">TFLOP/s", "tflops", significant),
    (">GB/s", "gb_per_s", significant),
    (">of limit, %", "of_bound", lambda share: significant(100 * share)),
    ("limited by", "bound_by", _text),
    (">bytes, of dense", "bytes_of_dense", significant),
    (">held, MB", "held_bytes", lambda size: significant(size / 1e6)),
    (">peak, MB", "peak_bytes", lambda size: significant(size / 1e6)),
    (">energy, mJ a hot call", "energy_j", lambda joules: significant(1e3 * joules)),
    (">power, W", "power_w", significant),
    (">SM clock, MHz", "sm_mhz", significant),
    ("mark", "mark", _text),
    (">late samples, %", "late", lambda share: significant(100 * share) if share else "–"),
    ("accuracy", "marks", _text),
    (">error, of bound", "error_of_bound", lambda error: significant(error, 2)),
    (">error, of usual", "error_of_usual", lambda error: significant(error, 2)),
    (">processes", "processes", _text),
    ("configuration", "configuration", _text),
    ("case", "case_id", _code),
]
