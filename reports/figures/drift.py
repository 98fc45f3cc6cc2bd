"""The baseline's time in each contest of the run, in order, and what the sensors read.

    % │ ●  ●   ●             time of a contest's baseline against its median over all processes
    0 ┼──●──●─●──●──         x: contests in the order of the run; vertical lines: processes
      └─────────────         ◆ throttled, power-limited or late while it was timed

A speedup is a ratio within one contest, so drift changes both of its times.
"""

import numpy as np
import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._html import NOTHING, note, wide
from sparsebench.reports.figures._svg import OURS, PEER, Look
from sparsebench.results.formatting import capital, significant
from sparsebench.results.problem_names import measure_text
from sparsebench.results.record import Status
from sparsebench.results.run.provenance import on_gpu
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.cases import CONTEST
from sparsebench.results.tables.frame import records

TITLE = "Drift and throttling"
ORDER = 76

SIZE, LEAST = (620, 150), 2.0  # the least span of the axis, in %
SENSORS = {"sm_mhz": ("SM clock", "MHz"), "temperature_c": ("Temperature", "°C")}
SENSORS |= {"power_w": ("Power", "W")}


def draw(analysis: Analysis) -> Markup:
    """Draw the baseline's drift over the contests of the run, and write what sensors read."""
    contests = _contests(analysis.rows)
    if len(contests) < 2:
        return NOTHING
    sensors = [*filter(None, (_sensor(contests[name], *text) for name, text in SENSORS.items()))]
    drawn = contests.replicate.nunique() > 1
    if not (drawn or sensors):
        return NOTHING
    words = [f"{capital(measure_text(contests.iloc[0]))}."]
    if on_gpu(analysis.run.environment):
        marked = int((contests["mark"] != "").sum())
        share = f"{marked} of {len(contests)} contests{' (diamonds)' * drawn}"
        words.append(f"The GPU slowed down, or waited for the host, in {share}.")
    words += sensors
    if drawn:
        words.append("Each vertical line starts a new process.")
    words.append("Both times of a speedup come from the same contest.")
    return note(" ".join(words)) + (_draw_chart(contests) if drawn else NOTHING)


def _contests(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the baseline's row of each contest of the first measure, in the order of the run."""
    base = rows[(rows.status == Status.OK) & rows.baseline.astype(bool) & rows.median_us.notna()]
    if base.empty:
        return base
    base = base[(base[CONTEST[1:]] == base[CONTEST[1:]].iloc[0]).all(axis=1)]
    base = base.drop_duplicates(["problem_id", "replicate", "attempt"])
    typical = base.groupby("problem_id").median_us.transform("median")
    order = np.arange(1, len(base) + 1)
    return base.assign(drift=100 * (base.median_us / typical - 1), contest=order)


def _sensor(values: pd.Series, name: str, unit: str) -> str:
    """Write the range of a sensor: `SM clock 1,755 to 1,980 MHz.`"""
    ends = dict.fromkeys(significant(end, 4) for end in (values.min(), values.max()))
    return f"{name} {' to '.join(ends)} {unit}." if values.notna().any() else ""


def _draw_chart(contests: pd.DataFrame) -> Markup:
    chart = Chart(SIZE, "contest", "baseline time against its median, %")
    for start in contests.contest[contests.replicate.diff().fillna(0) != 0]:
        chart.rule("x", start - 0.5, Look(width=0.6, alpha=0.35))
    for marked, points in contests.groupby(contests["mark"] != ""):
        look = Look(PEER, "D", None) if marked else Look(OURS, "o", None, size=3)
        titles = [
            f"contest {line['contest']}: {line['drift']:.2g} % {line['mark']}"
            for line in records(points)
        ]
        chart.line(points.contest, points.drift, look, titles)
    low, high = float(contests.drift.min()), float(contests.drift.max())
    margin = max(0.08 * (high - low), (LEAST - (high - low)) / 2)
    chart.limits["y"] = low - margin, high + margin
    return wide(chart.svg("drift of the baseline, %"))
