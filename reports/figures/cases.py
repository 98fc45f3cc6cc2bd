"""Every case in one table that sorts and filters, and the data it was made from."""

import base64
from typing import Any

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import NOTHING, Frames
from sparsebench.reports.figures._html import note, percent, plain, significant, table, times
from sparsebench.results.frame import fields

TITLE = "Every case"
ORDER = 100

EMBEDDED_BYTES = 2_000_000  # a larger CSV would be most of the page
HEADS = [">sparsity", "contender", "status", ">time, µs", ">low", ">high", ">speed-up", ">low"]
HEADS += [
    ">high",
    ">TFLOP/s",
    ">GB/s",
    ">bytes, of dense",
    ">error, of bound",
    ">processes",
    "case",
]


def draw(frames: Frames) -> Markup:
    """Show a line a case; the CSV of the whole summary is inside the page where it is small."""
    cases = frames.cases
    if cases.empty:
        return NOTHING
    names = [name for name in fields(cases) if name != "sparsity" and cases[name].notna().any()]
    names = [name for name in ["op", *names] if cases[name].nunique(dropna=False) > 1]
    heads = [f">{n}" if pd.api.types.is_numeric_dtype(cases[n]) else n for n in names]
    lines = [_line(line, names) for _, line in cases.iterrows()]
    tool = Markup('<input type="search" placeholder="filter, e.g. bsr 4096 ok" data-filter>')
    return _download(cases) + tool + table([*heads, *HEADS], lines, "sortable")


def _line(line: "pd.Series[Any]", names: list[str]) -> list[str | Markup]:
    return [
        *("–" if pd.isna(line[name]) else plain(line[name]) for name in names),
        percent(line.level),
        line.label,
        line.status.replace("_", " "),
        *(significant(line[name]) for name in ("median_us", "low_us", "high_us")),
        *(times(line[name]) for name in ("speedup", "speedup_low", "speedup_high")),
        *(significant(line[name]) for name in ("tflops", "gb_per_s", "bytes_of_dense")),
        significant(line.error_of_bound, 2),
        str(line.processes),
        Markup("<code>{}</code>").format(line.case_id),
    ]


def _download(cases: pd.DataFrame) -> Markup:
    data = cases.to_csv(index=False).encode()
    if len(data) > EMBEDDED_BYTES:
        return note(f"{len(data) / 1e6:.1f} MB as CSV: too large to put into this page.")
    url = f"data:text/csv;base64,{base64.b64encode(data).decode()}"
    link = Markup('<a download="cases.csv" href="{}">cases.csv</a>').format(url)
    return note(Markup("All columns of these {} cases: {}.").format(len(cases), link))
