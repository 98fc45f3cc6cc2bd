"""The fastest contender at every shape and level, dense ones included, and its lead."""

from typing import Any

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import (
    NOTHING,
    Frames,
    each_measure,
    named,
    panels,
    swept,
)
from sparsebench.reports.figures._html import note
from sparsebench.reports.figures._verdict import intervals, meaning, outcome, speedup
from sparsebench.reports.tables import html_table, without_dashes
from sparsebench.results.cases import winners
from sparsebench.results.formatting import between, percent, plain, significant, times
from sparsebench.results.outcome import Outcome

TITLE = "Fastest contender by shape and sparsity"
ORDER = 15

HEADS = ["problem", "at", "fastest", "weights", ">speedup", "outcome"]
HEADS += [">time, µs", "runner-up", ">leads by"]
HEADS += ["best sparse", ">over dense"]
WEIGHTS = ["pattern", "block"]
READ = (
    "Speedups are over the baseline of the suite. "
    "If dense is the fastest, the table also shows the best sparse "
    "contender. The best case was selected by the numbers shown here, so confirm it in a separate "
    "run (sparsebench confirm)."
)


def draw(frames: Frames) -> Markup:
    """List the winner of each shape at each level."""
    raced = frames.raced
    if raced.empty:
        return NOTHING
    return (
        note(Markup("<b>{}</b>. {}").format(frames.device, intervals(raced)))
        + each_measure(raced, _listed)
        + note(f"Clearly faster: {meaning(raced)[0]}. {READ}")
        + note(frames.noise.sentence)
    )


def _listed(cases: pd.DataFrame) -> Markup:
    x = swept(cases)
    same, groups = panels(cases, x, together=WEIGHTS)
    lines = [
        _line(title or "–", line, x) + _sparse(line, group)
        for title, group in groups
        for _, line in _best(winners(group), x).iterrows()
    ]
    return note(same) + html_table(*without_dashes(HEADS, lines))


def _best(cells: pd.DataFrame, x: str) -> pd.DataFrame:
    """Keep the largest speedup at each x, of the clearly faster cases if there are any.

    This also selects among blocks, which are different matrices and not contenders.
    """
    gain, haste = cells.speedup.fillna(0), -cells.median_us
    ranked = cells.assign(at=cells[x].round(4), gain=gain, haste=haste)
    ranked = ranked.sort_values(["at", "clear", "gain", "haste"], kind="stable")
    return ranked.drop_duplicates("at", keep="last")


def _line(title: str, line: "pd.Series[Any]", x: str) -> list[str | Markup]:
    return [
        title,
        percent(line.level) if x == "level" else f"{x} {plain(line[x])}",
        Markup("<b>{}</b>").format(_label(line.ran)),
        named(line, WEIGHTS) or "–",
        speedup(line),
        outcome(line),
        significant(line.median_us),
        "–" if pd.isna(line.runner_up) else _label(line.runner_up),
        str(Outcome.NOT_SETTLED) if line.tied else times(line.lead, line.lead_half),
    ]


def _sparse(line: "pd.Series[Any]", cases: pd.DataFrame) -> list[str | Markup]:
    """Return the best sparse contender of a contest that a dense one won, and its gain."""
    sparse = cases[(cases.problem_id == line.problem_id) & (cases.side != "dense")]
    sparse = sparse[sparse.gain.notna()]
    if line.side != "dense" or sparse.empty:
        return ["–", "–"]
    top = sparse.loc[sparse.gain.idxmax()]
    return [_label(top.ran), between(top.gain, top.low, top.high, top.half)]


def _label(ran: str) -> str:
    """Name a contender as sentences do; the table of every case shows what a portfolio chose."""
    return ran.partition(" (chosen: ")[0]
