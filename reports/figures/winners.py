"""The answer in sentences, and a table of the best contender at every shape and level.

A speed-up is written with its interval, outcome, baseline, shape, dtype and device: without them
it says nothing. Where the run has verdicts, only a case with the verdict `faster` is a headline.
"""

from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from numpy.typing import NDArray

from sparsebench.reports.figures._figure import (
    NOTHING,
    Frames,
    each_measure,
    named,
    panels,
    swept,
)
from sparsebench.reports.figures._html import (
    folded,
    note,
    percent,
    plain,
    significant,
    table,
    three,
    times,
    without_dashes,
)
from sparsebench.reports.figures._verdict import above_floor, intervals, meaning, outcome
from sparsebench.results.summary import winners

TITLE = "Which format wins"
ORDER = 10

HEADS = ["problem", "at", "fastest", "weights", ">speed-up", ">interval", "outcome"]
HEADS += [">above launch", ">time, µs", "runner-up", ">leads by"]
WEIGHTS = ["pattern", "block"]
OPEN = 8  # lines of the table shown at once
READ = (
    "Above launch: the speed-up when the time of an almost empty op is taken from both times; for "
    "ops below 20 µs. The best case was chosen by the numbers shown here: confirm it in a run of "
    "its own (sparsebench confirm)."
)


def draw(frames: Frames) -> Markup:
    """Write one sentence per shape, and a table over shapes and levels."""
    raced = frames.raced
    if raced.empty:
        return Markup("<p>No case of this run is ok: there is no answer.</p>")
    return (
        note(Markup("<b>{}</b>. {}").format(frames.device, intervals(raced)))
        + each_measure(raced, _answers)
        + note(f"Clearly faster: {meaning(raced)[0]}. {READ}")
        + note(frames.noise.sentence)
    )


def _answers(cases: pd.DataFrame) -> Markup:
    x = swept(cases)
    same, groups = panels(cases, x, together=WEIGHTS)
    sentences = [_sentence(title, group, x) for title, group in groups]
    items = Markup("").join(Markup("<li>{}</li>").format(sentence) for sentence in sentences)
    best = [(title or same, _best(winners(group), x)) for title, group in groups]
    lines = [_line(title, line, x) for title, group in best for _, line in group.iterrows()]
    listed = table(*without_dashes(HEADS, lines))
    shown = listed if len(lines) <= OPEN else folded(f"All {len(lines)} shapes and levels", listed)
    return note(same) + Markup('<ul class="answers">{}</ul>').format(items) + shown


def _best(cells: pd.DataFrame, x: str) -> pd.DataFrame:
    """Keep the largest speed-up at each x, among the clearly faster ones if there are any.

    The choice is also among blocks, which are different matrices and not contenders.
    """
    gain, haste = cells.speedup.fillna(0), -cells.median_us
    ranked = cells.assign(at=cells[x].round(4), gain=gain, haste=haste)
    ranked = ranked.sort_values(["at", "clear", "gain", "haste"], kind="stable")
    return ranked.drop_duplicates("at", keep="last")


def _sentence(title: str, cases: pd.DataFrame, x: str) -> Markup:
    where = Markup('<span class="where">{}</span> ').format(title) if title else NOTHING
    others = cases[cases.label != cases.baseline_label]
    if others.empty:
        return where + f"only {', '.join(cases.label.unique())} ran."
    best = _best(others, x)
    if best.speedup.isna().all():
        words = Markup("<b>{}</b> {}, without an ok baseline to compare with.")
        return where + words.format(best.ran.iloc[0], _measured(best.iloc[0], x))
    if not best.clear.any():
        bases = ", ".join(best.baseline_label.dropna().unique())
        return where + f"No contender is clearly faster than {bases} at {_others(best, x)}."
    top = best.iloc[best.speedup.where(best.clear).argmax()]
    words = Markup("{}<b>{}</b> {} over {} with <b>{}</b> {}. ").format(
        where, times(top.speedup), _interval(top), top.baseline_label, top.ran, _measured(top, x)
    )
    if best.clear.all():
        return words + "At every measured point a contender is clearly faster."
    return words + f"No contender is clearly faster at {_others(best, x)}."


def _measured(line: "pd.Series[Any]", x: str) -> str:
    at = ", ".join(filter(None, [_at(line, x), named(line, WEIGHTS)]))
    return f"at {at} ({significant(line.median_us)} µs, {line.samples} samples)"


def _others(best: pd.DataFrame, x: str) -> str:
    """Name the points where no contender is clearly faster, and the outcome of the best one."""
    words = best.outcome.str.replace("_", " ").mask(best.clear)
    said = []
    for word in words.dropna().unique():
        chosen = (words == word).to_numpy(dtype=bool)
        more = best.more_processes[chosen].dropna()
        ends = " to +".join(dict.fromkeys([str(more.min()), str(more.max())])) if len(more) else ""
        would = f"; +{ends} processes would decide" if ends else ""
        said.append(_points(best, chosen, x) + (f" ({word}{would})" if word else ""))
    return ", ".join(said)


def _line(title: str, line: "pd.Series[Any]", x: str) -> list[str | Markup]:
    return [
        title,
        _at(line, x),
        Markup("<b>{}</b>").format(line.ran),
        named(line, WEIGHTS) or "–",
        times(line.speedup),
        _interval(line),
        outcome(line),
        above_floor(line),
        significant(line.median_us),
        "–" if pd.isna(line.runner_up) else line.runner_up,
        "tie" if line.tied else times(line.lead),
    ]


def _interval(line: "pd.Series[Any]") -> str:
    if np.isnan(line.speedup):
        return "–"
    return f"[{three(line.speedup_low)}–{three(line.speedup_high)}]"


def _at(line: "pd.Series[Any]", x: str) -> str:
    return percent(line.level) if x == "level" else f"{x} {plain(line[x])}"


def _points(best: pd.DataFrame, chosen: NDArray[np.bool_], x: str) -> str:
    """Name the chosen points, and neighbours as a span: `50 % to 80 %, 95 %`."""
    points = [_at(line, x) for _, line in best.iterrows()]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen, [0]])))
    spans = [dict.fromkeys([points[a], points[b - 1]]) for a, b in edges.reshape(-1, 2)]
    return ", ".join(" to ".join(span) for span in spans)
