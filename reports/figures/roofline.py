"""Rate against arithmetic intensity, below the ceilings that the run measured on its device.

    log TFLOP/s │      ________ matrix products        x: FLOPs of non-zeros / fewest bytes
                │    ／ ●  ▲                            y: FLOPs of non-zeros / time
                │  ／ ●                                 round: ours; triangle: peers
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
from sparsebench.reports.figures._figure import MEASURE, NOTHING, Frames, describe_line, measures
from sparsebench.reports.figures._html import beside, download, note
from sparsebench.reports.figures._svg import Look, roles
from sparsebench.reports.figures._sweep import scatter
from sparsebench.results.formatting import significant

TITLE = "Roofline"
ORDER = 66

SIZE = (420, 270)
DATA = ["op", "m", "n", "k", "dtype", "block", "level", "label", "side", "intensity", "tflops"]


def draw(frames: Frames) -> Markup:
    """Draw one panel per data type, if the run measured its ceilings."""
    ceilings: Mapping[str, Any] = frames.run.environment.get("ceilings") or {}
    cases = frames.raced[(frames.raced.tflops > 0) & (frames.raced.gb_per_s > 0)]
    if not ceilings or cases.empty:
        return NOTHING
    first = measures(cases)[0]
    first = first.assign(intensity=1e3 * first.tflops / first.gb_per_s)
    drawn = [_panel(str(dtype), group, ceilings) for dtype, group in first.groupby("dtype")]
    words = (
        f"{describe_line(first.iloc[0], MEASURE).capitalize()}. FLOPs count only non-zeros, and "
    )
    words += (
        "bytes count each operand once. The lines are the ceilings measured on this device. Black "
    )
    words += "points are dense."
    key = roles({"ours": "ours", "peer": "peers"})
    return note(words) + key + beside(drawn, "maps") + download("roofline", first[DATA])


def _panel(
    dtype: str, cases: pd.DataFrame, ceilings: Mapping[str, Any]
) -> tuple[str, Markup, Markup]:
    chart = Chart(SIZE, "FLOP/byte", "TFLOP/s of non-zeros", log="xy")
    x, y = cases.intensity, cases.tflops
    ends = float(x.min()) / 1.5, float(x.max()) * 1.5
    peak = float(ceilings["matrix_tflops"].get(dtype, np.inf))
    gb_per_s = ceilings["read_gb_per_s"]
    roof = np.geomspace(*ends, 60)
    bound = np.minimum(roof * gb_per_s / 1e3, peak)
    chart.limits = {"x": ends, "y": (y.min() / 1.3, max(y.max(), bound.max()) * 1.3)}
    chart.line(roof, bound, Look(), name="bound")
    texts = cases.apply(
        lambda line: (
            f"{line.label}: {significant(line.tflops)} TFLOP/s, "
            f"{describe_line(line, ['m', 'n', 'k', 'level'])}"
        ),
        axis=1,
    )
    scatter(chart, cases, ("intensity", "tflops"), texts)
    rate = f"{significant(peak)} TFLOP/s" if np.isfinite(peak) else "no matrix rate measured"
    caption = Markup("<p>{}; {} GB/s</p>").format(rate, significant(gb_per_s))
    return dtype, chart.svg(f"{TITLE}, {dtype}"), caption
