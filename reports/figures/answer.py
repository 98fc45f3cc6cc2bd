"""The answer in sentences, and the best contender of every shape and level.

A speed-up is written with its interval, its baseline, its shape and dtype, and the device: without
them it says nothing.
"""

from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from numpy.typing import NDArray

from sparsebench.reports.figures._figure import NOTHING, Frames, named, panels, swept
from sparsebench.reports.figures._html import (
    folded,
    note,
    percent,
    plain,
    significant,
    table,
    times,
)
from sparsebench.results.summary import winners

TITLE = "Which format wins"
ORDER = 10

HEADS = ["problem", "at", "fastest", "weights", ">speed-up", ">interval", ">time, µs", "runner-up"]
HEADS += [">leads by"]
WEIGHTS = ["pattern", "block"]
OPEN = 8  # sentences, and lines of the table, shown at once
READ = (
    "Clearly faster: the whole interval is above 1. A best is chosen on the numbers it is shown "
    "with: confirm it in a run of its own."
)


def draw(frames: Frames) -> Markup:
    """Write a sentence a shape and a table over shapes and levels."""
    raced = frames.raced
    if raced.empty:
        return Markup("<p>No case of this run is ok: there is no answer.</p>")
    x = swept(raced)
    same, groups = panels(winners(raced), x, together=WEIGHTS)
    best = [(title, _best(group, x)) for title, group in groups]
    sentences = [_sentence(title, group, x) for title, group in best]
    items = Markup("").join(Markup("<li>{}</li>").format(sentence) for sentence in sentences)
    lines = [_line(title or same, line, x) for title, group in best for _, line in group.iterrows()]
    listed = table(HEADS, lines)
    return (
        note(Markup("{} · <b>{}</b>. {}").format(same, frames.device, _intervals(raced)))
        + Markup('<ul class="answers">{}</ul>').format(items)
        + (listed if len(lines) <= OPEN else folded(f"All {len(lines)} shapes and levels", listed))
        + note(f"{READ}{_noise(frames.cases)}")
    )


def _best(cells: pd.DataFrame, x: str) -> pd.DataFrame:
    """Keep, at each x, the block that gains most: blocks are different matrices, not contenders."""
    gain = cells.speedup.fillna(0)
    order = cells.assign(gain=gain, at=cells[x].round(4)).sort_values(["at", "gain"])
    return order.drop_duplicates("at", keep="last")


def _sentence(title: str, best: pd.DataFrame, x: str) -> Markup:
    where = Markup('<span class="where">{}</span> ').format(title) if title else NOTHING
    ahead = best[best.label != best.baseline_label]
    if ahead.empty:
        base = ", ".join(best.label.unique())
        if best.runner_up.isna().all():
            return where + f"only {base} ran."
        return where + f"nothing beats {base} at any of {len(best)} measured points."
    top = ahead.iloc[ahead.speedup.fillna(0).argmax()]
    name = Markup("<b>{}</b>").format(top.label)
    measured = f"({significant(top.median_us)} µs, {top.samples} samples)"
    at = f"at {', '.join(filter(None, [_at(top, x), named(top, WEIGHTS)]))}"
    if np.isnan(top.speedup):
        return where + name + f" {at} {measured}, without an ok baseline to compare with."
    words = Markup("{}<b>{}</b> {} over {} with ").format(
        where, times(top.speedup), _interval(top), top.baseline_label
    )
    words += name + f" {at} {measured}. "
    lost = ~(best.speedup_low > 1).to_numpy()
    if not lost.any():
        return words + "At every measured point a contender is clearly faster."
    points = _points(best, lost, x)
    return words + f"No contender is clearly faster at {points}."


def _line(title: str, line: "pd.Series[Any]", x: str) -> list[str | Markup]:
    lead = "tie" if line.tied else times(line.lead)
    return [
        title,
        _at(line, x),
        Markup("<b>{}</b>").format(line.label),
        named(line, WEIGHTS) or "–",
        times(line.speedup),
        _interval(line),
        significant(line.median_us),
        "–" if pd.isna(line.runner_up) else line.runner_up,
        lead,
    ]


def _interval(line: "pd.Series[Any]") -> str:
    if np.isnan(line.speedup):
        return "–"
    return f"[{times(line.speedup_low)[:-1]}–{times(line.speedup_high)[:-1]}]"


def _at(line: "pd.Series[Any]", x: str) -> str:
    return percent(line.level) if x == "level" else f"{x} {plain(line[x])}"


def _points(best: pd.DataFrame, chosen: NDArray[np.bool_], x: str) -> str:
    """Name the chosen points, neighbours as a span: `50 % to 80 %, 95 %`."""
    points = [_at(line, x) for _, line in best.iterrows()]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen, [0]])))
    spans = [dict.fromkeys([points[a], points[b - 1]]) for a, b in edges.reshape(-1, 2)]
    return ", ".join(" to ".join(span) for span in spans)


def _intervals(cases: pd.DataFrame) -> str:
    kinds = " or ".join(sorted(cases.interval.unique()))
    range_of = kinds.replace("over", "the range over", 1)
    return f"Intervals are {range_of}; they are not confidence intervals."


def _noise(cases: pd.DataFrame) -> str:
    """Say how far the two halves of an A/A pair are apart: no smaller gap means anything."""
    keys = ["problem_id", "scope", "cache", "format", "kernel", "params", "options"]
    twins = cases[cases.twin.astype(bool)].merge(cases[~cases.twin.astype(bool)], on=keys)
    gaps = pd.Series(np.log(twins.speedup_x / twins.speedup_y)).abs().dropna()
    if gaps.empty:
        return " The run has no A/A pair, so its noise floor is unknown."
    worst = f"{100 * np.expm1(gaps.max()):.2g} %"
    return f" Its A/A pairs ({len(gaps)}) differ by up to {worst}: smaller gaps are noise."
