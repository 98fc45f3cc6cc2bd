"""The baseline's time, the clock, the temperature and the power of each contest, in order.

    % │ ●  ●   ●             time of a contest's baseline against its median over all processes
    0 ┼──●──●─●──●──         x: contests in the order of the run; vertical lines: processes
      └─────────────         ◆ throttled, power-limited or late while it was timed

A speedup is a ratio within one contest, so drift changes both of its times.
"""

from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._figure import MEASURE, NOTHING, Frames, describe_line
from sparsebench.reports.figures._html import download, note, wide
from sparsebench.reports.figures._svg import Look, series
from sparsebench.results.record import Status
from sparsebench.results.run.provenance import on_gpu
from sparsebench.results.tables.frame import records

TITLE = "Drift and throttling"
ORDER = 76

SIZE, LEAST = (620, 150), 0.02  # the least span of an axis: 2 % of the median
TELEMETRY = {"sm_mhz": "SM clock, MHz", "temperature_c": "°C", "power_w": "power, W"}


def draw(frames: Frames) -> Markup:
    """Draw the baseline's drift and every sensor that was read, over the contests of the run."""
    taken = _contests(frames.rows)
    if len(taken) < 2:
        return NOTHING
    drawn = []
    if taken.replicate.nunique() > 1:
        drawn.append(("drift", "baseline time against its median, %"))
    drawn += [(name, words) for name, words in TELEMETRY.items() if taken[name].notna().sum() > 1]
    if not drawn:
        return NOTHING
    words = (
        f"{describe_line(taken.iloc[0], MEASURE).capitalize()}, contests in the order of the run. "
    )
    if on_gpu(frames.run.environment):
        marked = int((taken["mark"] != "").sum())
        words += (
            f"The GPU slowed down, or waited for the host, in {marked} of {len(taken)} contests "
            "(diamonds). "
        )
    words += (
        "Each vertical line starts a new process. Both times of a speedup come from the same "
        "contest."
    )
    panels = [_panel(taken, name, title) for name, title in drawn]
    columns = ["contest", "replicate", "problem_id", "median_us", "drift", *TELEMETRY, "mark"]
    return note(words) + Markup("").join(panels) + download("drift", taken[columns])


def _contests(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the baseline's row of each contest of the first measure, in the order of the run."""
    base = rows[(rows.status == Status.OK) & rows.baseline.astype(bool) & rows.median_us.notna()]
    if base.empty:
        return base
    base = base[(base[MEASURE] == base[MEASURE].iloc[0]).all(axis=1)]
    base = base.drop_duplicates(["problem_id", "replicate", "attempt"])
    typical = base.groupby("problem_id").median_us.transform("median")
    order = np.arange(1, len(base) + 1)
    return base.assign(drift=100 * (base.median_us / typical - 1), contest=order)


def _panel(taken: pd.DataFrame, name: str, title: str) -> Markup:
    readings = taken[taken[name].notna()]
    chart = Chart(SIZE, "contest", title)
    for start in taken.contest[taken.replicate.diff().fillna(0) != 0]:
        chart.rule("x", start - 0.5, Look(width=0.6, alpha=0.35))
    for chosen, look in (
        (readings["mark"] == "", series(0).but(marker="o")),
        (readings["mark"] != "", series(6).but(marker="D")),
    ):
        points = readings[chosen]
        texts = [_text(line, name) for line in records(points)]
        chart.line(points.contest, points[name], look.but(dash=None), texts)
    low, high = readings[name].min(), readings[name].max()
    least = 100 * LEAST if name == "drift" else LEAST * abs(high)
    margin = max(0.08 * (high - low), (least - (high - low)) / 2)
    chart.limits["y"] = float(low - margin), float(high + margin)
    return wide(chart.svg(title))


def _text(line: dict[Any, Any], name: str) -> str:
    marked = f", {line['mark']}" if line["mark"] else ""
    return f"contest {line['contest']}, process {line['replicate']}: {line[name]:.4g}{marked}"
