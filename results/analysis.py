"""A run as three tables: the one way from samples to verdicts.

    Run ─> rows    one line per row: ratios block by block, units (frame.py)
        ─> noise   A/A pairs and the noise floors (noise.py)
        ─> cases   one line per case, scope and cache state, with its verdict (summary.py)

Nothing of it is on disk: it is computed from the rows whenever a run is read.
"""

from dataclasses import dataclass

import pandas as pd

from sparsebench.results.frame import frame
from sparsebench.results.noise import Noise, noise
from sparsebench.results.store import Run
from sparsebench.results.summary import summary


@dataclass(frozen=True)
class Analysis:
    """The tables of a run; their columns are those of `frame`, `Noise` and `summary`."""

    rows: pd.DataFrame
    noise: Noise
    cases: pd.DataFrame


def analyse(run: Run) -> Analysis:
    """Return the tables of a run. A million samples take about two seconds."""
    rows = frame(run.rows)
    found = noise(rows, frame(run.reference))
    return Analysis(rows, found, summary(rows, found))
