"""The first screen: the findings of a run, with a grid and a figure for every choice of the fields.

m ▾   n × k ▾   dtype ▾                  a view per choice; the script shows one of them
Faster than dense: blocks of 64 from 80 % to 95 % sparsity, up to 7.1× [7.0, 7.3].
┌──────┬──────┐   ×│    ●──●  ours
│ 1.2× │ 3.2× │    │ ▲──▲     best sparse peer
└──────┴──────┘   1┼───────── dense
"""

import json

import pandas as pd
from markupsafe import Markup

from sparsebench.reports import grids
from sparsebench.reports.figures._chart import Chart, named_rows
from sparsebench.reports.figures._html import NOTHING, note
from sparsebench.reports.figures._svg import ROLES
from sparsebench.reports.findings import headline
from sparsebench.reports.rivals import rivals
from sparsebench.results.formatting import brackets, capital, duration
from sparsebench.results.problem_names import field_text
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.contests import size_key
from sparsebench.results.tables.grid import EVERY, Grid, View, column_text, findings, grid

TITLE = "Which format wins"
ORDER = 10

MOST = 60  # views on a page, which says how many it leaves out
SIZE, ROW = (400, 235), 24  # pixels of the figure, and of a row of named dots
HEADS = {**grids.AXES, "scope": "measured", "cache": "L2 cache", "kv_heads": "KV heads"}
SIDES = {"ours": "Circles: best of ours", "peer": "Triangles: best sparse peer"}


def draw(analysis: Analysis) -> Markup:
    """Draw every view with selectors. That of the headline is first; the others are hidden."""
    case = headline(analysis).get("case")
    views = sorted(analysis.views, key=lambda view: case not in {*view.lines.case_id})
    if not views:
        return Markup("<p>No case of this run has a time, so there is no answer.</p>")
    held = brackets(analysis.timed.gain_interval)
    held = f"{capital(held)}." if held else ""
    of_views = [_sides(view) for view in views[:MOST]]
    limits = _limits(of_views)
    drawn = [
        _view(i, views[i], held, _figure(of_sides, limits)) for i, of_sides in enumerate(of_views)
    ]
    rest = f"{len(views) - MOST} of {len(views)} choices are not drawn here. "
    rest += "The table of every case lists all cases."
    more = note(rest) if len(views) > MOST else NOTHING
    beside = Markup("").join(table.html() for table in rivals(analysis))
    return _choose(views[:MOST]) + Markup("").join(drawn) + beside + more


def _sides(view: View) -> Grid:
    """Return the best of each side by column, as the figure shows them."""
    return grid(view.lines[view.lines.gain.notna()], view.x, row="side")


def _limits(of_views: list[Grid]) -> tuple[float, float] | None:
    """Return one axis for the figures of all views, so that they can be compared."""
    best = pd.DataFrame([case for of_sides in of_views for case in of_sides.cases])
    if best.empty:
        return None
    gains = best[["gain", "low", "high"]].astype(float)
    return min(1.0, gains.min().min()) / 1.1, max(1.0, gains.max().max()) * 1.1


def _choose(views: list[View]) -> Markup:
    """Return a selector for each field in which views differ."""
    names = [n for n in views[0].choice if len({view.choice.get(n) for view in views}) > 1]
    if not names:
        return NOTHING
    selects = Markup("").join(_select(name, views) for name in names)
    form = '<form class="choose" aria-label="View">{}<output role="status"></output></form>'
    return Markup(form).format(selects)


def _select(name: str, views: list[View]) -> Markup:
    values = {view.choice[name] for view in views if view.choice.get(name)} - {EVERY}
    options = [EVERY] * any(view.choice.get(name) == EVERY for view in views)
    options += sorted(values, key=_number_first)
    items = Markup("").join(
        Markup('<option value="{}"{}>{}</option>').format(
            value,
            Markup(" selected") if value == views[0].choice[name] else "",
            (name in ("pattern", "scope") and field_text(name, value)) or value,
        )
        for value in options
    )
    return Markup('<label>{} <select name="{}" autocomplete="off">{}</select></label>').format(
        HEADS.get(name, name.replace("_", " ")), name, items
    )


def _number_first(text: str) -> tuple[float, float, str]:
    number = pd.to_numeric(text, errors="coerce")
    return size_key(text) if pd.isna(number) else size_key(float(number))


def _view(number: int, view: View, held: str, figure: Markup) -> Markup:
    page = '<div class="view" data-choice="{}"{}>{}{}<div class="pair">{}{}</div></div>'
    texts = grids.sentences(findings(view.grid))
    items = Markup("").join(map(_item, texts))
    caption = Markup(
        "Each cell shows the speedup of the fastest contender of a row over the fastest dense one, "
        'or the range over several problems. Hatched: <a href="#words">not settled</a>. Select a '
        "cell to see its rivals and how to run it. {}"
    ).format(held)
    return Markup(page).format(
        json.dumps(view.choice),
        Markup(" hidden") if number else "",
        Markup('<ul class="answers">{}</ul>').format(items),
        Markup('<p class="where">{}</p>').format(grids.about_view(view)),
        grids.html(view.grid, lambda case: f"#case-{case['case_id']}", caption),
        figure,
    )


def _item(sentence: str) -> Markup:
    """Print the outcome that a sentence begins with in bold."""
    head, colon, rest = sentence.partition(": ")
    text = Markup("<b>{}:</b> {}").format(head, rest) if colon else head
    return Markup("<li>{}</li>").format(text)


def _figure(of_sides: Grid, limits: tuple[float, float] | None) -> Markup:
    """Draw the best of each side: lines if x is a number, and rows of dots if x is a name."""
    if len(of_sides.columns) < 2:
        return NOTHING
    x, axis = of_sides.x, grids.axis_of(of_sides)
    labels = [column_text(x, at) for at in of_sides.columns]
    across = x in ("shape", "block")
    if across:
        chart = named_rows(labels, SIZE[0], ROW, "speedup over dense, ×", log="x")
    else:
        chart = Chart(SIZE, axis, "speedup over dense, ×", log="y")
        chart.ticks["x"] = [*enumerate(labels)]
    if limits:
        chart.limits["x" if across else "y"] = limits
    chart.rule("x" if across else "y", 1, name="dense")
    sides = [side for side in SIDES if side in of_sides.rows]
    for side in reversed(sides):
        _line(chart, of_sides, side, across)
    caption = f"{'. '.join(SIDES[side] for side in sides)}, in the best problem of each column."
    figure = '<figure class="wide">{}<figcaption>{}</figcaption></figure>'
    return Markup(figure).format(chart.svg(f"Speedup over dense by {axis}"), caption)


def _line(chart: Chart, of_sides: Grid, side: str, across: bool) -> None:
    """Draw one side with its intervals and tooltips; names have no order, so none is joined."""
    cells = of_sides.rows[side]
    cases = pd.DataFrame([cell.best for cell in cells.values()])
    places = pd.Series([list(of_sides.columns).index(at) for at in cells], dtype=float)
    look = ROLES[side].but(dash=None) if across else ROLES[side]
    titles = [
        f"{column_text(of_sides.x, at)}: {cell.best['label']} {grids.gain_text(cell.best)}, "
        f"{duration(cell.best['median_us'])}"
        for at, cell in cells.items()
    ]
    chart.spans(places, cases.low, cases.high, look.but(width=1.4, alpha=0.7, dash=""), across)
    if across:
        chart.line(cases.gain, places, look, titles)
    else:
        chart.line(places, cases.gain, look, titles, side)
