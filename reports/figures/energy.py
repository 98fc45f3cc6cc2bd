"""Energy of a call beside its time: what a kernel saves of one, against what it saves of the other.

    energy ×│      ● ／     x: baseline's time / contender's time
            │   ▲ ／        y: baseline's energy / contender's energy, of hot calls
           1┼──／           on the diagonal a call takes as much power as the baseline's

Drawn where the run read the sensor of the board.
"""

import numpy as np
import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import MEASURE, NOTHING, Frames, measures, named
from sparsebench.reports.figures._html import download, note
from sparsebench.reports.figures._svg import INK, ROLES, canvas, roles, style, svg
from sparsebench.reports.figures._sweep import log_scale
from sparsebench.results.formatting import times

TITLE = "Energy"
ORDER = 72

PLACE = ["problem_id", "scope", "cache", "label"]
DATA = ["op", "m", "n", "k", "dtype", "block", "level", "label", "speedup", "saved", "energy_j"]


def draw(frames: Frames) -> Markup:
    """Draw a point a case, if its energy and that of its baseline were measured."""
    raced = frames.raced
    known = raced.set_index(PLACE).energy_j
    known = known[~known.index.duplicated()]
    bases = pd.MultiIndex.from_frame(raced[[*PLACE[:3], "baseline_label"]])
    saved = known.reindex(bases).to_numpy(dtype=float) / raced.energy_j.to_numpy(dtype=float)
    cases = raced.assign(saved=saved)
    cases = cases[np.isfinite(cases.saved) & (cases.saved > 0) & cases.speedup.notna()]
    cases = cases[cases.label != cases.baseline_label]
    if len(cases) < 2:
        return NOTHING
    first = measures(cases)[0]
    words = (
        f"{named(first.iloc[0], MEASURE).capitalize()}; energy is of hot calls, from the sensor "
    )
    words += "of the board. On the dotted line a call draws the baseline's power."
    return (
        note(words)
        + roles({"ours": "ours", "peer": "peers", "dense": "other dense ones"})
        + _drawn(first)
        + download("energy", first[DATA])
    )


def _drawn(cases: pd.DataFrame) -> Markup:
    with style():
        figure, axes = canvas((420, 300))
        both = np.concatenate([cases.speedup, cases.saved, [1.0]])
        ends = both.min() / 1.15, both.max() * 1.15
        axes.plot(ends, ends, ":", color=INK, linewidth=1)
        axes.set_ylim(*ends)
        said = {}
        for side in ("dense", "peer", "ours"):
            own = cases[cases.side == side]
            look = {**ROLES[side], "linestyle": "none", "markersize": 4, "markeredgewidth": 0}
            axes.plot(own.speedup, own.saved, gid=f"of {side}", alpha=0.75, **look)
            said[f"of {side}"] = [
                f"{line.label}: {times(line.speedup, line.uncertainty)} as fast, "
                f"energy {times(line.saved)}"
                for _, line in own.iterrows()
            ]
        log_scale(axes, *ends)
        axes.set_xlabel("speed-up over the baseline, ×")
        axes.set_ylabel("energy saved, ×")
        drawing = svg(figure, "energy against speed-up", said)
    return Markup('<figure class="wide">{}</figure>').format(drawing)
