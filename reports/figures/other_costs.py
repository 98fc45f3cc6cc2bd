"""What a speedup does not show, in a line each: bytes, conversion, rates and energy.

A call saves the baseline's time minus its own, so the calls that pay back a conversion are its time
over the saved time. The table of every case has the columns behind these lines.
"""

from collections.abc import Callable
from math import ceil

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import Frames, describe_line
from sparsebench.reports.figures._html import note
from sparsebench.results.formatting import FORMATS, duration, significant, times
from sparsebench.results.tables.families import OF_ACTIVATIONS, OF_MASKS
from sparsebench.results.tables.frame import fields

TITLE = "Bytes, conversion, rates and energy"
ORDER = 60


def draw(frames: Frames) -> Markup:
    """Write one line for each quantity that the run has."""
    cases = frames.contenders
    sparse = cases[(cases.format != "dense") & (cases.level > 0)]
    stored = sparse[sparse.bytes_of_dense.notna() & ~sparse.format.isin(OF_ACTIVATIONS | OF_MASKS)]
    converted = cases[cases.convert_us.notna() & cases.speedup.notna()]
    lines = [
        _by_format("Stored bytes, indices included, per byte of non-zeros", stored, _bytes),
        _by_format("Conversion from dense weights", converted, _conversion),
        _rates(frames.first),
        _energy(frames.first),
    ]
    return Markup("").join(map(note, filter(None, lines)))


def _by_format(title: str, cases: pd.DataFrame, write: Callable[[pd.DataFrame], str]) -> str:
    """Write a text for each format: `TITLE: BSR 1.02; CSR 1.51–2.00.`"""
    texts = [
        f"{FORMATS.get(str(name), str(name))} {write(group)}"
        for name, group in cases.groupby("format", sort=False)
    ]
    return f"{title}: {'; '.join(texts)}." if texts else ""


def _bytes(cases: pd.DataFrame) -> str:
    return _span(cases.bytes_of_dense / (1 - cases.level))


def _conversion(cases: pd.DataFrame) -> str:
    faster = cases[cases.clear]
    calls = (faster.convert_us / (faster.median_us * (faster.speedup - 1))).map(ceil)
    ends = "–".join(dict.fromkeys(f"{end:,}" for end in (calls.min(), calls.max())))
    paid = f"paid back after {ends} calls" if len(calls) else "never paid back"
    return f"{duration(cases.convert_us.median())}, {paid}"


def _rates(cases: pd.DataFrame) -> str:
    if cases.tflops.isna().all():
        return ""
    best = cases.nlargest(1, "tflops").iloc[0]
    names = [*(name for name in fields(cases) if name != "sparsity"), "level"]
    return (
        f"Highest rates: {significant(best.tflops)} TFLOP/s of non-zeros ({best.label}, "
        f"{describe_line(best, names)}), dense-equivalent "
        f"{significant(cases.dense_tflops.max())} TFLOP/s, and {significant(cases.gb_per_s.max())} "
        "GB/s of the bytes that must move."
    )


def _energy(cases: pd.DataFrame) -> str:
    joules = cases.drop_duplicates(["problem_id", "label"]).set_index(["problem_id", "label"])
    bases = pd.MultiIndex.from_frame(cases[["problem_id", "baseline_label"]])
    saved = joules.energy_j.reindex(bases).to_numpy() / cases.energy_j
    saved = saved[(cases.label != cases.baseline_label) & saved.notna()]
    if saved.empty:
        return ""
    ends = f"{times(saved.min())} to {times(saved.max())}, median {times(saved.median())}"
    return f"The baseline's energy over the contender's, of hot calls: {ends}."


def _span(values: pd.Series) -> str:
    """Write the least and the greatest of some values: `1.02–1.10`."""
    return "–".join(dict.fromkeys(significant(end) for end in (values.min(), values.max())))
