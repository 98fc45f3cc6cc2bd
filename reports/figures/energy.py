"""Energy of a call against its time, both relative to the baseline.

    energy ×│      ● ／     x: baseline's time / contender's time
            │   ▲ ／        y: baseline's energy / contender's energy, of hot calls
           1┼──／           on the diagonal a call draws the same power as the baseline's

Drawn if the run read the board's power sensor.
"""

import numpy as np
import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._chart import Chart
from sparsebench.reports.figures._figure import MEASURE, NOTHING, Frames, describe_line, measures
from sparsebench.reports.figures._html import download, note, wide
from sparsebench.reports.figures._svg import Look, roles
from sparsebench.reports.figures._sweep import scatter
from sparsebench.results.formatting import times

TITLE = "Energy"
ORDER = 72

SIDES = {"ours": "ours", "peer": "peers", "dense": "other dense contenders"}
PLACE = ["problem_id", "scope", "cache", "label"]
DATA = ["op", "m", "n", "k", "dtype", "block", "level", "label", "speedup", "saved", "energy_j"]


def draw(frames: Frames) -> Markup:
    """Draw a point per case if its energy and its baseline's were measured."""
    raced = frames.raced
    energies = raced.set_index(PLACE).energy_j
    energies = energies[~energies.index.duplicated()]
    bases = pd.MultiIndex.from_frame(raced[[*PLACE[:3], "baseline_label"]])
    saved = energies.reindex(bases).to_numpy(dtype=float) / raced.energy_j.to_numpy(dtype=float)
    cases = raced.assign(saved=saved)
    cases = cases[np.isfinite(cases.saved) & (cases.saved > 0) & cases.speedup.notna()]
    cases = cases[cases.label != cases.baseline_label]
    if len(cases) < 2:
        return NOTHING
    first = measures(cases)[0]
    words = (
        f"{describe_line(first.iloc[0], MEASURE).capitalize()}. Energies are those of hot calls, "
    )
    words += "read from the board's sensor. On the dotted line a call draws the baseline's power."
    data = download("energy", first[DATA])
    return note(words) + roles(SIDES) + wide(_draw_chart(first)) + data


def _draw_chart(cases: pd.DataFrame) -> Markup:
    chart = Chart((420, 300), "speedup over the baseline, ×", "energy saved, ×", log="xy")
    both = np.concatenate([cases.speedup, cases.saved, [1.0]])
    ends = float(both.min() / 1.15), float(both.max() * 1.15)
    chart.limits = {"x": ends, "y": ends}
    chart.line(ends, ends, Look(dash="1 2", width=1))
    texts = cases.apply(
        lambda line: (
            f"{line.label}: {times(line.speedup, line.uncertainty)} as fast, "
            f"energy {times(line.saved)}"
        ),
        axis=1,
    )
    scatter(chart, cases, ("speedup", "saved"), texts)
    return chart.svg("energy against speedup")
