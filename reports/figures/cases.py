"""All cases in one table that sorts and filters, and the same data as CSV."""

from collections.abc import Callable
from typing import Any

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import MEASURE, NOTHING, Frames, named
from sparsebench.reports.figures._html import download, note
from sparsebench.reports.figures._verdict import above_floor, outcome
from sparsebench.reports.tables import html_table, without_dashes
from sparsebench.results.formatting import percent, plain, significant, times
from sparsebench.results.frame import fields

TITLE = "Every case"
ORDER = 100


def draw(frames: Frames) -> Markup:
    """Show one line per case; the page holds the whole summary as CSV."""
    cases = frames.cases
    if cases.empty:
        return NOTHING
    names = [name for name in fields(cases) if name != "sparsity" and cases[name].notna().any()]
    names = [n for n in ["op", *names, *MEASURE] if cases[n].nunique(dropna=False) > 1]
    heads = [f">{n}" if pd.api.types.is_numeric_dtype(cases[n]) else n for n in names]
    said = cases.assign(
        outcome=[outcome(line) for _, line in cases.iterrows()],
        above=[above_floor(line) for _, line in cases.iterrows()],
    )
    shown = [column for column in COLUMNS if column[1] in said]
    heads += [head for head, _, _ in shown]
    columns = [[_text(value) for value in said[name]] for name in names]
    columns += [[write(value) for value in said[name]] for _, name, write in shown]
    lines = [list(line) for line in zip(*columns, strict=True)]
    same = [n for n in ["op", *fields(cases), *MEASURE] if n not in [*names, "sparsity"]]
    constant = " ".join(_text(cases[name].iloc[0]) for name in same)
    whole = Markup("All columns of these {} lines: {}.")
    return (
        note(whole.format(len(cases), download("cases", cases)))
        + Markup(TOOL).format(named(cases.iloc[0], same), constant)
        + html_table(*without_dashes(heads, lines), "sortable", _ids(cases))
    )


def _ids(cases: pd.DataFrame) -> list[str]:
    """Name each line by its case; the second and later measures of a case have a number."""
    later = cases.groupby("case_id").cumcount()
    numbers = zip(cases.case_id, later, strict=True)
    return [f"case-{case}-{count}" if count else f"case-{case}" for case, count in numbers]


def _text(value: Any) -> str:
    return "–" if pd.isna(value) or value == "" else plain(value)


def _status(status: str) -> str:
    return status.replace("_", " ")


def _megabytes(size: Any) -> str:
    return "–" if pd.isna(size) else significant(size / 1e6)


def _hundredths(share: float) -> str:
    return significant(100 * share)


def _millijoules(energy_j: float) -> str:
    return significant(1e3 * energy_j)


def _error(error: float) -> str:
    return significant(error, 2)


def _rate(q: float) -> str:
    return "–" if pd.isna(q) else f"{q:.1g}"


def _code(text: str) -> Markup:
    return Markup("<code>{}</code>").format(text)


TOOL = (
    '<p class="note">The same in every line: {}. Words find lines that have them all; m:16, '
    "speed-up:&gt;2 and time:10..50 look in one column, and so do the fields below the heads.</p>"
    '<form class="filter" data-same="{}"><input type="search" name="q" aria-label="find lines" '
    'placeholder="e.g. bsr ok speed-up:&gt;2"> <output></output> '
    '<button type="reset">show all</button></form>'
)
COLUMNS: list[tuple[str, str, Callable[[Any], str]]] = [  # head, column, how its values are written
    (">sparsity", "level", percent),
    ("contender", "label", _text),
    ("chosen", "chosen", _text),
    ("status", "status", _status),
    (">time, µs", "median_us", significant),
    (">time low", "low_us", significant),
    (">time high", "high_us", significant),
    (">speed-up", "speedup", times),
    (">speed-up low", "speedup_low", times),
    (">speed-up high", "speedup_high", times),
    ("outcome", "outcome", _text),
    (">q", "q", _rate),
    (">above launch", "above", _text),
    (">TFLOP/s", "tflops", significant),
    (">GB/s", "gb_per_s", significant),
    (">of bound, %", "of_bound", _hundredths),
    ("bound by", "bound_by", _text),
    (">bytes, of dense", "bytes_of_dense", significant),
    (">held, MB", "held_bytes", _megabytes),
    (">peak, MB", "peak_bytes", _megabytes),
    (">energy, mJ a hot call", "energy_j", _millijoules),
    (">power, W", "power_w", significant),
    (">SM clock, MHz", "sm_mhz", significant),
    ("mark", "mark", _text),
    ("accuracy", "marks", _text),
    (">error, of bound", "error_of_bound", _error),
    (">error, of usual", "error_of_usual", _error),
    (">processes", "processes", _text),
    ("case", "case_id", _code),
]
