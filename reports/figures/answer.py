"""The first screen: the fastest format, its break-even and its lead, with a map and a figure.

    m ▾   n × k ▾   dtype ▾   block ▾        a view per choice; the script shows one of them
    BSR beats dense with 16 × 16 blocks above some point between 50 % and 80 % sparsity
    ┌──────┬──────┐   ×│    ●──●  ours
    │ 1.2× │ 3.2× │    │ ▲──▲     best sparse peer
    └──────┴──────┘   1┼───────── dense

The sentences come from results/answer.py and the cells from results/tables/contests.py.
"""

import json
from collections.abc import Callable
from typing import Any

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._chart import Chart, named_rows
from sparsebench.reports.figures._figure import NOTHING, Frames
from sparsebench.reports.figures._html import note, shaded
from sparsebench.reports.figures._svg import ROLES
from sparsebench.reports.tables import html_table
from sparsebench.results.answer import (
    USUAL,
    against,
    column_text,
    sentences,
    variants,
    where,
    winner,
)
from sparsebench.results.formatting import (
    FORMATS,
    between,
    blocks_text,
    brackets,
    capital,
    cell_times,
    duration,
    percent,
    plain,
    span_text,
)
from sparsebench.results.problem_names import field_text
from sparsebench.results.tables.contests import ANY, MOST, View, sort_values_of
from sparsebench.results.tables.frame import records

TITLE = "Which format wins"
ORDER = 10

ACROSS = 5  # columns of a map that fit a narrow screen; cells of more columns wrap there
SIZE, ROW = (400, 235), 24  # pixels of the figure, and of a row of named dots
HEADS = {"shape": "n × k", "scope": "measured", "cache": "L2 cache"}
SIDES = {"ours": "Circles: best of ours", "peer": "Triangles: best sparse peer"}


def draw(frames: Frames) -> Markup:
    """Draw every view with selectors; all views but the first are hidden."""
    views = frames.views
    if not views:
        return Markup("<p>No case of this run has a time, so there is no answer.</p>")
    held = brackets(frames.timed.gain_interval)
    held = f"{capital(held)}." if held else ""
    drawn = [_view(i, view, frames.cases, held) for i, view in enumerate(views[:MOST])]
    rest = f"{len(views) - MOST} of {len(views)} choices are not drawn here. "
    rest += "The table of every case lists all cases."
    more = note(rest) if len(views) > MOST else NOTHING
    return _choose(views[:MOST]) + Markup("").join(drawn) + more


def _choose(views: list[View]) -> Markup:
    """Return a selector for each field in which views differ."""
    names = [n for n in views[0].choice if len({view.choice.get(n) for view in views}) > 1]
    if not names:
        return NOTHING
    fields = Markup("").join(_select(name, views) for name in names)
    form = '<form class="choose" aria-label="View">{}<output role="status"></output></form>'
    return Markup(form).format(fields)


def _select(name: str, views: list[View]) -> Markup:
    values = pd.Series([view.choice[name] for view in views if view.choice.get(name)])
    words = {"all": "all, as rows", ANY: "the best"}
    first = [value for value in ("all", ANY) if value in set(values)]
    options = [*first, *(value for value in _sort_texts(values) if value not in words)]
    items = Markup("").join(
        Markup('<option value="{}"{}>{}</option>').format(
            value,
            Markup(" selected") if value == views[0].choice[name] else "",
            words.get(value) or (name == "pattern" and field_text(name, value)) or value,
        )
        for value in options
    )
    return Markup('<label>{} <select name="{}" autocomplete="off">{}</select></label>').format(
        HEADS.get(name, name), name, items
    )


def _sort_texts(values: "pd.Series[Any]") -> list[str]:
    numbers = pd.to_numeric(values, errors="coerce")
    if numbers.notna().any():
        return [str(value) for value in values[numbers.sort_values().index].dropna().unique()]
    return [str(value) for value in sort_values_of(values)]


def _view(number: int, view: View, cases: pd.DataFrame, held: str) -> Markup:
    page = '<div class="view" data-choice="{}"{}>{}{}<div class="pair">{}{}</div></div>'
    items = Markup("").join(_item(sentence) for sentence in sentences(view))
    return Markup(page).format(
        json.dumps(view.choice),
        Markup(" hidden") if number else "",
        Markup('<ul class="answers">{}</ul>').format(items),
        Markup('<p class="where">{}</p>').format(
            " · ".join(filter(None, [where(view), variants(view, cases)]))
        ),
        _map(view, held),
        _figure(view),
    )


def _item(sentence: str) -> Markup:
    """Print the topic of a sentence, which ends in a colon, in bold."""
    head, colon, rest = sentence.partition(": ")
    text = Markup("<b>{}:</b> {}").format(head, rest) if colon else head
    return Markup("<li>{}</li>").format(text)


def _map(view: View, held: str) -> Markup:
    timed = view.cells[view.cells.best_gain.notna()]
    columns = sort_values_of((view.cells if timed.empty else timed).x)
    lines = {(line.x, line.y): line for _, line in view.cells.iterrows()}
    rows = [
        [
            Markup('<span class="row">{}</span>').format(field_text(view.y, row) if view.y else ""),
            *(_cell(view, lines.get((column, row))) for column in columns),
        ]
        for row in sort_values_of(view.cells.y)
    ]
    heads = [Markup('<span class="unseen">{}</span>').format(HEADS.get(view.y, view.y or "case"))]
    words = [
        percent(value) if view.x == "level" else field_text(view.x, value) for value in columns
    ]
    words = [text.removeprefix("n × k ") for text in words]
    read = Markup(
        "Each cell shows the winner and the speedup of the fastest sparse contender over the "
        'fastest dense one. Hatched: <a href="#words">not settled</a>. Select a cell to see its '
        "rivals and how to run it. {}"
    ).format(held)
    if (view.cells["count"] > 1).any():
        read += (
            f" A cell with several problems (at most {view.cells['count'].max()}) shows the median."
        )
    return Markup('<figure class="map">{}<figcaption>{}</figcaption></figure>').format(
        html_table([*heads, *words], rows, "map many" if len(words) > ACROSS else "map"), read
    )


def _cell(view: View, line: "pd.Series[Any] | None") -> Markup:
    if line is None or pd.isna(line.best_gain):
        return Markup('<span class="cell none">–</span>')
    title = f"{column_text(view, line)}: {winner(line)}"
    name = Markup("_<wbr>").join(_who(view, line).split("_"))
    span = span_text(line.best_low, line.best_high, line.best_half)
    gain = cell_times(line.best_gain, line.best_half)
    text = Markup('<b>{}</b><span class="span">{}</span> {}').format(gain, span, name)
    return shaded(line.best_gain, line.best_decided, f"#case-{line.best_case_id}", title, text)


def _who(view: View, line: "pd.Series[Any]") -> str:
    """Name the winner of a cell, with its format and block unless rows are blocks."""
    if not line.best_gain > 1:
        return f"dense, {line.dense_name}"
    kernel = str(line.best_name).partition(" ")[0]
    if view.y == "block" or line.best_tile in ("", "1"):
        return kernel
    return f"{FORMATS.get(line.best_kind, line.best_kind)} {line.best_tile}, {kernel}"


def _along(view: View) -> tuple[str, pd.DataFrame, str]:
    """Return the field on the x axis of the figure, its cells, and what these share.

    If rows are blocks, x is that of the map, with the best row. If rows are m or shapes, they
    become x, at one column: 90 % sparsity or m 16 if it was measured.
    """
    cells = view.cells[view.cells.best_gain.notna()]
    if view.y in ("", "block") or cells.empty:
        best = cells.sort_values("best_gain").drop_duplicates("x", keep="last")
        return view.x, best.assign(at=best.x), "the best block" if view.y else ""
    values = sort_values_of(cells.x)
    usual = {"level": USUAL, "m": 16}.get(view.x)
    chosen = usual if usual in values else values[-1 if view.x == "level" else 0]
    at = cells[cells.x == chosen]
    return view.y, at.assign(at=at.y), column_text(view, at.iloc[0])


def _figure(view: View) -> Markup:
    """Draw the best of each side: lines if x is a number, and rows of dots if x is a name."""
    name, cells, shared = _along(view)
    if len(cells) < 2:
        return NOTHING
    places = {value: i for i, value in enumerate(sort_values_of(cells["at"]))}
    cells = cells.assign(place=cells["at"].map(places)).sort_values("place")
    write: Callable[[Any], str] = {"level": percent, "block": blocks_text}.get(name, plain)
    labels = [write(value) for value in places]
    axis = {"level": view.units.removeprefix(" of ") or "sparsity", "shape": ""}.get(name, name)
    across = name in ("shape", "block")
    if across:
        chart = named_rows(labels, SIZE[0], ROW, "speedup over dense, ×", log="x")
    else:
        chart = Chart(SIZE, axis, "speedup over dense, ×", log="y")
        chart.ticks["x"] = [*enumerate(labels)]
    chart.rule("x" if across else "y", 1, name="dense")
    for side in ("peer", "ours"):
        _line(chart, cells[cells[f"{side}_gain"].notna()], side, name, across)
    words = [text for side, text in SIDES.items() if cells[f"{side}_gain"].notna().any()]
    words = [capital(shared)] * bool(shared) + words
    caption = f"{'. '.join(words)}. Line at 1: {against(view).removeprefix('against ')}."
    figure = '<figure class="wide">{}<figcaption>{}</figcaption></figure>'
    drawing = chart.svg(f"Speedup over dense by {HEADS.get(name, name)}")
    return Markup(figure).format(drawing, caption)


def _line(chart: Chart, cells: pd.DataFrame, side: str, name: str, across: bool) -> None:
    """Draw one side with its intervals and tooltips; names have no order, so none is joined."""
    if cells.empty:
        return
    gain, low, high = (cells[f"{side}_{part}"] for part in ("gain", "low", "high"))
    look = ROLES[side].but(dash=None) if across else ROLES[side]
    titles = [
        f"{field_text(name, line['at'])}: {line[f'{side}_label']} "
        f"{between(*(line[f'{side}_{part}'] for part in ('gain', 'low', 'high', 'half')))}, "
        f"{duration(line[f'{side}_median_us'])}"
        for line in records(cells)
    ]
    chart.spans(cells.place, low, high, look.but(width=1.4, alpha=0.7, dash=""), across)
    if across:
        chart.line(gain, cells.place, look, titles)
    else:
        chart.line(cells.place, gain, look, titles, side)
