"""All cases in one table that sorts and filters, and the same data as CSV."""

import base64
from collections.abc import Callable
from typing import Any

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import MEASURE, NOTHING, Frames
from sparsebench.reports.figures._html import (
    note,
    percent,
    plain,
    significant,
    table,
    times,
    without_dashes,
)
from sparsebench.reports.figures._verdict import above_floor, outcome
from sparsebench.results.frame import as_csv, fields

TITLE = "Every case"
ORDER = 100

EMBEDDED_BYTES = 2_000_000  # of CSV at most: more would be most of the page


def draw(frames: Frames) -> Markup:
    """Show one line per case; the page holds the CSV of the whole summary if that is small."""
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
    heads += [head for head, _, _ in COLUMNS]
    columns = [said[name].map(_text) for name in names]
    columns += [said[name].map(write) for _, name, write in COLUMNS]
    lines = [list(line) for line in zip(*columns, strict=True)]
    tool = Markup('<input type="search" placeholder="filter, e.g. bsr 4096 ok" data-filter>')
    return _download(cases) + tool + table(*without_dashes(heads, lines), "sortable")


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


def _download(cases: pd.DataFrame) -> Markup:
    data = as_csv(cases).encode()
    if len(data) > EMBEDDED_BYTES:
        return note(f"{len(data) / 1e6:.1f} MB as CSV: too large to put into this page.")
    url = f"data:text/csv;base64,{base64.b64encode(data).decode()}"
    link = Markup('<a download="cases.csv" href="{}">cases.csv</a>').format(url)
    return note(Markup("All columns of these {} lines: {}.").format(len(cases), link))


COLUMNS: list[tuple[str, str, Callable[[Any], str]]] = [  # head, column, how its values are written
    (">sparsity", "level", percent),
    ("contender", "label", _text),
    ("chosen", "chosen", _text),
    ("status", "status", _status),
    (">time, µs", "median_us", significant),
    (">low", "low_us", significant),
    (">high", "high_us", significant),
    (">speed-up", "speedup", times),
    (">low", "speedup_low", times),
    (">high", "speedup_high", times),
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
    (">error, of bound", "error_of_bound", _error),
    (">processes", "processes", _text),
    ("case", "case_id", _code),
]
