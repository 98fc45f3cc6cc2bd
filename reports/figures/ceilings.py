"""How close each contender comes to the hardware limit, by the device's measured ceilings.

    limit = max(bytes that must move / bandwidth, FLOPs of non-zeros / matrix rate)
    share of the limit = limit / median time

The run measures bandwidth and matrix rates, or takes those of an earlier run of the same sitting
(harness/bench/device_ceilings.py). A reference contest that beats a ceiling raises it for the
contests that follow (results/ceilings.py).
"""

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._chart import named_rows
from sparsebench.reports.figures._html import NOTHING, note, wide
from sparsebench.reports.figures._svg import ROLES
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.formatting import capital, significant
from sparsebench.results.problem_names import measure_text
from sparsebench.results.run.store import StoredRun
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.contests import SHORT_US, usual

TITLE = "Fraction of the hardware limit"
ORDER = 65

WIDTH, ROW = 620, 24  # CSS pixels of the figure, and of the line of a contender
READ = (
    "A point is a case: circles of our kernels, triangles of peers, squares of dense ones; hollow "
    f"below {SHORT_US:g} µs, where the launch takes much of the time. The limit counts only "
    "non-zeros: at 90 % sparsity a dense kernel that is bound by compute reaches at most 10 % of "
    "it. A contender's name is followed by its median and its best share."
)


def draw(analysis: Analysis) -> Markup:
    """Write the ceilings, and draw one point per case, the best contender at the top."""
    line = _ceilings(analysis.run)
    cases = usual(analysis.timed)
    cases = cases[cases.of_bound.notna()]
    if cases.empty:
        return note(line) if line else NOTHING
    groups = sorted(cases.groupby("label"), key=lambda group: -group[1].of_bound.median())
    words = note(f"{line} {capital(measure_text(cases.iloc[0]))}. {READ}")
    return words + wide(_draw_chart([(str(label), group) for label, group in groups]))


def _draw_chart(groups: list[tuple[str, pd.DataFrame]]) -> Markup:
    shares = [100 * group.of_bound for _, group in groups]
    names = [
        f"{label}: {significant(share.median(), 2)}, {significant(share.max(), 2)}"
        for (label, _), share in zip(groups, shares, strict=True)
    ]
    chart = named_rows(names, WIDTH, ROW, "of the hardware limit, %")
    chart.limits["x"] = (0, 105)
    chart.rule("x", 100)
    for y, (_, group) in enumerate(groups):
        for (side, short), points in group.groupby(["side", group.median_us < SHORT_US]):
            look = ROLES[str(side)].but(dash=None, size=4, alpha=0.6, hollow=bool(short))
            chart.line(100 * points.of_bound, [y] * len(points), look)
    return chart.svg("fraction of the hardware limit by contender")


def _ceilings(run: StoredRun) -> str:
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
