"""How close each contender comes to the hardware limit, by the device's measured ceilings.

    limit = max(bytes that must move / bandwidth, FLOPs of non-zeros / matrix rate)
    share of the limit = limit / median time

The run measures bandwidth and matrix rates, or takes those of an earlier run of the same sitting
(harness/bench/device_ceilings.py). A reference contest that beats a ceiling raises it for the
contests that follow (results/ceilings.py).
"""

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._figure import MEASURE, NOTHING, Frames, describe_line, measures
from sparsebench.reports.figures._html import note, wide
from sparsebench.reports.figures._svg import Look, series
from sparsebench.reports.tables import html_table, without_dashes
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.formatting import significant
from sparsebench.results.run.store import Run
from sparsebench.results.tables.contests import SHORT_US

TITLE = "Fraction of the hardware limit"
ORDER = 65

CLASSES = {"memory": "o", "compute": "s", "launch": "o"}  # kinds of limits, and their markers
SHIFT = {"memory": 0.2, "compute": 0.0, "launch": -0.2}
WIDTH_PX, LINE_PX = 620, 30
READ = (
    "Circles: bound by memory; squares: bound by compute; hollow: below "
    f"{SHORT_US:g} µs, where the launch takes much of the time. "
    "The limit counts only non-zeros: at 90 % sparsity a dense kernel that is bound by compute "
    "reaches at most 10 % of it. The table counts the cases that each kind of limit bounds."
)


def draw(frames: Frames) -> Markup:
    """Write the ceilings, draw one point per case, and list medians by kind of bound."""
    line = _ceilings(frames.run)
    bounded = frames.raced[frames.raced.of_bound.notna()]
    if bounded.empty:
        return note(line) if line else NOTHING
    first = measures(bounded)[0]
    first = first.assign(bounded=_limits_of(first))
    labels = list(first.groupby("label").of_bound.median().sort_values().index)
    heads = ["contender"]
    for name in CLASSES:
        heads += [f">{name}-bound", ">median, %", ">best, %"]
    lines = [_line(label, first[first.label == label]) for label in reversed(labels)]
    words = note(f"{line} {describe_line(first.iloc[0], MEASURE).capitalize()}. {READ}")
    return words + _draw_chart(frames, first, labels) + html_table(*without_dashes(heads, lines))


def _limits_of(cases: pd.DataFrame) -> pd.Series:
    """Return what bounds each case: `launch` below SHORT_US, else memory or compute."""
    bound = cases.bound_by.mask(cases.median_us < SHORT_US, "launch")
    return bound.where(cases.scope == "kernel", cases.scope)


def _ceilings(run: Run) -> str:
    """Describe the ceilings of the device; "" if the run has none."""
    if not run.environment.get("ceilings"):
        return ""
    ceilings = Ceilings.from_json(run.environment["ceilings"])
    rates = [f"{name} {significant(rate)}" for name, rate in ceilings.matrix_tflops.items()]
    parts = [
        f"reading {significant(ceilings.read_gb_per_s)} GB/s",
        f"copying {significant(ceilings.copy_gb_per_s)} GB/s",
        f"matrix products {', '.join(rates)} TFLOP/s",
        f"an empty launch {significant(ceilings.launch_us)} µs",
        f"L2 cache {significant(ceilings.l2_bytes / 2**20)} MiB",
    ]
    if ceilings.write_gb_per_s is not None:
        parts.insert(2, f"writing {significant(ceilings.write_gb_per_s)} GB/s")
    if gpus := len(run.environment.get("devices", [])):
        return f"Ceilings, the highest of {gpus} devices: {'; '.join(parts)}."
    _, raises = ceilings.after(run.reference)
    raised = "".join(f" {line[0].upper()}{line[1:]}." for line in raises)
    when = f" {ceilings.age_s:.0f} s before the run" if ceilings.age_s else ""
    return f"Ceilings, measured on this device{when}: {'; '.join(parts)}.{raised}"


def _draw_chart(frames: Frames, cases: pd.DataFrame, labels: list[str]) -> Markup:
    chart = Chart((WIDTH_PX, 50 + LINE_PX * len(labels)), "of the hardware limit, %")
    chart.limits = {"x": (0, 105), "y": (-0.6, len(labels) - 0.4)}
    chart.ticks["y"] = [*enumerate(labels)]
    chart.rule("x", 100)
    for y, label in enumerate(labels):
        number = frames.series.get(label)
        look = Look() if number is None else series(number)
        for name, group in cases[cases.label == label].groupby("bounded"):
            kind = str(name) if name in CLASSES else "launch"
            dots = Look(look.color, CLASSES[kind], None, 1, 4, 0.6, hollow=kind == "launch")
            x = 100 * group.of_bound
            chart.line(x, [y + SHIFT[kind]] * len(x), dots)
    return wide(chart.svg("fraction of the hardware limit by contender"))


def _line(label: str, cases: pd.DataFrame) -> list[str | Markup]:
    cells: list[str | Markup] = [label]
    for name in CLASSES:
        shares = cases.of_bound[cases.bounded == name]
        cells += [str(len(shares) or "–")]
        cells += [significant(100 * share) for share in (shares.median(), shares.max())]
    return cells
