"""Rate against arithmetic intensity, below the ceilings that the run measured on its device.

    log TFLOP/s │      ________ matrix products      x: FLOPs of non-zeros / fewest bytes
                │    ／ ● bsr_small                  y: FLOPs of non-zeros / time
                │  ／ ● bsr_triton                   the highest rate of each kernel has its name
                └─────────────── log FLOP/byte

FLOPs count only non-zeros, and bytes count each operand once: a kernel on the roof moves nothing
twice and multiplies no zero.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._html import NOTHING, note, wide
from sparsebench.reports.figures._svg import ROLES, Look
from sparsebench.results.formatting import capital, significant
from sparsebench.results.problem_names import measure_text, problem_name
from sparsebench.results.run.provenance import on_gpu
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.contests import usual
from sparsebench.results.tables.frame import records

TITLE = "Roofline"
ORDER = 66

SIZE = (620, 320)
READ = (
    "FLOPs count only non-zeros, and bytes count each operand once. Circles are our kernels, "
    "triangles are peers, squares are dense. The large marker of each kernel is its highest rate."
)


def draw(analysis: Analysis) -> Markup:
    """Draw one figure per data type, if the run measured the ceilings of a GPU."""
    ceilings: Mapping[str, Any] = analysis.run.environment.get("ceilings") or {}
    cases = usual(analysis.timed)
    cases = cases[(cases.tflops > 0) & (cases.gb_per_s > 0)]
    if not ceilings or not on_gpu(analysis.run.environment) or cases.empty:
        return NOTHING
    cases = cases.assign(intensity=1e3 * cases.tflops / cases.gb_per_s)
    words = f"{capital(measure_text(cases.iloc[0]))}. {READ}"
    drawn = [_draw_chart(str(dtype), group, ceilings) for dtype, group in cases.groupby("dtype")]
    return note(words) + Markup("").join(map(wide, drawn))


def _draw_chart(dtype: str, cases: pd.DataFrame, ceilings: Mapping[str, Any]) -> Markup:
    peak, gb_per_s = ceilings["matrix_tflops"].get(dtype, np.inf), ceilings["read_gb_per_s"]
    rate = f"{significant(peak)} TFLOP/s" if np.isfinite(peak) else "no matrix rate measured"
    limit = f"hardware limit: {rate}, {significant(gb_per_s)} GB/s"
    chart = Chart(SIZE, f"FLOP/byte ({limit})", f"TFLOP/s of non-zeros, {dtype}", log="xy")
    chart.limits["x"] = float(cases.intensity.min()) / 1.5, float(cases.intensity.max()) * 1.5
    roof = np.geomspace(*chart.limits["x"], 60)
    chart.line(roof, np.minimum(roof * gb_per_s / 1e3, peak), Look(), name="hardware limit")
    for (side, kernel), group in cases.groupby(["side", "kernel"], sort=False):
        look, best = ROLES[str(side)].but(dash=None), group.nlargest(1, "tflops")
        _points(chart, group, look.but(size=2.8, alpha=0.4))
        _points(chart, best, look.but(size=5.5), str(kernel))
    return chart.svg(f"{TITLE}, {dtype}")


def _points(chart: Chart, cases: pd.DataFrame, look: Look, name: str = "") -> None:
    titles = [
        f"{line['label']}: {significant(line['tflops'])} TFLOP/s, "
        f"{problem_name(line, ['m', 'n', 'k', 'level'])}"
        for line in records(cases)
    ]
    chart.line(cases.intensity, cases.tflops, look, titles, name)
