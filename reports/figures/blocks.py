"""A map of block and sparsity: the fastest contender other than the baseline in each cell."""

from typing import Any

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import NOTHING, Frames, each_measure, ordered, panels
from sparsebench.reports.figures._html import note
from sparsebench.reports.figures._svg import shade
from sparsebench.reports.figures._verdict import meaning
from sparsebench.reports.tables import html_table
from sparsebench.results.analysis import winners
from sparsebench.results.formatting import percent, times

TITLE = "Block by sparsity"
ORDER = 30


def draw(frames: Frames) -> Markup:
    """Show the best speedup of each cell and its contender, if a run has several blocks."""
    raced = frames.raced
    raced = raced[raced.label.isin(frames.series) & raced.speedup.notna()]
    return each_measure(raced, _maps)


def _maps(raced: pd.DataFrame) -> Markup:
    cells = winners(raced)
    if cells.block.nunique() < 2:
        return NOTHING
    same, groups = panels(cells, "level", together=["block"])
    maps = [_map(title, group) for title, group in groups if group.block.nunique() > 1]
    if not maps:
        return NOTHING
    words = f"{same}. Each cell shows the fastest contender other than the baseline and its "
    words += "speedup over the baseline. ≈: the lead over the runner-up is not settled. "
    words += f"Blue: faster than the baseline. Hatched: {meaning(raced)[1]}."
    return note(words) + Markup('<div class="maps">{}</div>').format(Markup("").join(maps))


def _map(title: str, cells: pd.DataFrame) -> Markup:
    levels = sorted(cells.level.round(3).unique())
    lines = {(line.block, round(line.level, 3)): line for _, line in cells.iterrows()}
    rows = [
        [block, *(_cell(lines.get((block, level))) for level in levels)]
        for block in ordered(cells.block)
    ]
    heads = ["block", *map(percent, levels)]
    return Markup("<figure><h3>{}</h3>{}</figure>").format(title, html_table(heads, rows, "map"))


def _cell(line: "pd.Series[Any] | None") -> Markup:
    if line is None:
        return Markup('<span class="cell">–</span>')
    paint, ink = shade(line.speedup)
    look = '<span class="cell{}" style="background-color:{};color:{}"><b>{}{}</b>{}</span>'
    return Markup(look).format(
        " undecided" if line.undecided else "",
        paint,
        ink,
        "≈ " if line.tied else "",
        times(line.speedup, line.uncertainty),
        line.label,
    )
