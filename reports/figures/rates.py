"""Rates: FLOP/s of non-zeros, dense-equivalent FLOP/s, and GB/s of the bytes that must move."""

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import MEASURE, NOTHING, Frames, describe_line, measures
from sparsebench.reports.figures._html import note
from sparsebench.reports.tables import html_table
from sparsebench.results.formatting import significant
from sparsebench.results.tables.frame import fields

TITLE = "Rates"
ORDER = 70

RATES = {"tflops": "TFLOP/s of non-zeros", "dense_tflops": "dense-equivalent", "gb_per_s": "GB/s"}
READ = (
    "TFLOP/s of non-zeros do not count padding. Dense-equivalent TFLOP/s count zeros as if they "
    "were multiplied. GB/s count non-zeros, activations and outputs once each, without indices. "
    "Medians are over different problems; the highest rate belongs to a single case."
)


def draw(frames: Frames) -> Markup:
    """List each contender's median and highest rate, and the case with the highest one."""
    if frames.raced.empty:
        return NOTHING
    raced = measures(frames.raced)[0]
    heads = ["contender", ">cases"]
    for name in RATES.values():
        heads += [f">{name}, median", ">highest"]
    names = [n for n in [*fields(raced), "level"] if n != "sparsity" and raced[n].nunique() > 1]
    lines = [_line(str(label), cases, names) for label, cases in raced.groupby("label", sort=False)]
    body = html_table([*heads, "highest TFLOP/s at"], lines)
    return note(f"{describe_line(raced.iloc[0], MEASURE)}. {READ}") + body


def _line(label: str, cases: pd.DataFrame, names: list[str]) -> list[str]:
    cells = [label, str(len(cases))]
    for rate in RATES:
        cells += [significant(cases[rate].median()), significant(cases[rate].max())]
    best = cases.nlargest(1, "tflops")
    return [*cells, "–" if best.empty else describe_line(best.iloc[0], names) or "–"]
