"""Write a grid and its findings: sentences, a table for terminals and Markdown, and HTML.

findings ─> sentences    Faster than dense: blocks of 64 from 50 % to 90 % sparsity, up to
                         4.8× [4.7, 4.9]. Slower: CSR.
grid     ─> table        2.6×   5.5×?          (? is not settled)
         ─> html         cells in the colour of their gain, each with a tooltip and a link
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Any

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._html import shaded
from sparsebench.reports.tables import Cell as TableCell
from sparsebench.reports.tables import Table
from sparsebench.results.formatting import (
    amount,
    between,
    brackets,
    conditions,
    duration,
    join_words,
    number,
    size_text,
    span_text,
    times,
)
from sparsebench.results.problem_names import split_fields
from sparsebench.results.record import UNPRUNED
from sparsebench.results.statistics.outcome import Outcome
from sparsebench.results.statistics.ratio import ONE_CARD, IntervalKind
from sparsebench.results.tables.contests import multiplies_zeros, sort_values_of
from sparsebench.results.tables.frame import fields
from sparsebench.results.tables.grid import Case, Cell, Finding, Grid, View, column_text, outcome_of

OPENINGS = {
    Outcome.FASTER: "Faster than dense",
    Outcome.SLOWER: "Slower",
    Outcome.EQUAL: "Equal to dense",
    Outcome.NOT_SETTLED: "Not settled",
    Outcome.NOT_MEASURED: "No gain is known",
}
STYLES = {Outcome.FASTER: "good", Outcome.SLOWER: "bad"}
SOME = "for some problems"
NOTHING = "No sparse contender has a time."
ACROSS = 5  # columns that fit a narrow screen; cells of more columns wrap there
SHOWN = 4  # problems in the tooltip of a cell
BLOCKS = "blocks of "
WEIGHTS = {"original": "with unpruned weights", "pruned": "on the same zeros"}
AXES = {"m": "tokens", "shape": "n × k"}  # names of columns without units


def sentences(findings: Sequence[Finding]) -> list[str]:
    """Return a sentence for each outcome, the formats that are faster than dense first."""
    texts = []
    for word, opening in OPENINGS.items():
        groups: dict[str, list[Finding]] = {}
        for finding in findings:
            if finding.outcome is word:
                group = finding.group or SOME if word is Outcome.FASTER else ""
                groups.setdefault(group, []).append(finding)
        parts = [_part(group, alike) for group, alike in groups.items()]
        texts += [f"{opening}: {'; '.join(parts)}."] if parts else []
    return texts or [NOTHING]


def _part(group: str, findings: Sequence[Finding]) -> str:
    """Write findings of one outcome and group: `CSR at 50 % sparsity, up to 1.52× [1.46, 1.58]`."""
    text = " ".join([_names(findings), group]).strip()
    best = max(findings, key=lambda finding: float(finding.best["gain"]))
    return f"{text}, up to {gain_text(best.best)}" if best.outcome is Outcome.FASTER else text


def _names(findings: Sequence[Finding]) -> str:
    """Name contenders together: blocks of 32, 64 and 128 and 2:4."""
    names: dict[str, list[str]] = {}
    for finding in findings:
        before, blocks, size = finding.contender.rpartition(BLOCKS)
        names.setdefault(before + blocks, []).append(size)
    others = names.pop("", [])
    sizes = {kind: sort_values_of(pd.Series(of_kind)) for kind, of_kind in names.items()}
    return join_words([*(f"{kind}{join_words(each)}" for kind, each in sizes.items()), *others])


def gain_text(case: Case) -> str:
    """Write the gain of a case with its interval, and its outcome if it is not faster."""
    text = between(*(case.get(end, float("nan")) for end in ("gain", "low", "high", "half")))
    beside = ", ".join(filter(None, [doubt(case), on_same_zeros(case)]))
    return f"{text} ({beside})" if beside else text


def doubt(case: Case) -> str:
    """Return the outcome of a gain that is not faster, or that one card measured it; else ""."""
    if case.get("gain_interval") == IntervalKind.NONE:
        return ONE_CARD
    return "" if outcome_of(case) is Outcome.FASTER else str(outcome_of(case))


def on_same_zeros(case: Case) -> str:
    """Write the gain over dense on the same zeros, if the case's gain is over other weights."""
    gain = case.get("zeros_gain", float("nan"))
    if case.get("over") != "original" or pd.isna(gain):
        return ""
    half = max(case["zeros_high"] - gain, gain - case["zeros_low"])
    return f"{times(gain, min(half, gain / 10))} over the same zeros"


def about(lines: pd.DataFrame, names: Sequence[str]) -> str:
    """Write what the problems of some lines share, and the dense contenders that gains are over."""
    sparse = lines[lines.side != "dense"]
    shared = split_fields(lines if sparse.empty else sparse, names)[1]
    return " · ".join(filter(None, [shared.replace(", ", " · "), against(lines)]))


def against(lines: pd.DataFrame) -> str:
    """Write the dense contenders that the gains of some lines are over, and their times."""
    dense = lines[lines.gain.notna()]
    if dense.empty:
        return "no dense contender has a time"
    ends = dict.fromkeys([duration(dense.dense_us.min()), duration(dense.dense_us.max())])
    names = join_words([*dict.fromkeys(dense.dense_name.str.removesuffix(UNPRUNED))])
    return f"over dense{weights(dense[dense.side != 'dense'])} ({names}, {' to '.join(ends)})"


def weights(lines: pd.DataFrame) -> str:
    """Say which weights the dense contenders of the gains multiply; "" if none has zeros.

    A contest has no unpruned weights if memory limits it, or if its run is an older one.
    """
    over = {*lines.over[multiplies_zeros(lines)]}
    words = [text for name, text in WEIGHTS.items() if name in over]
    words[1:] = [f"or {text} in contests without them" for text in words[1:]]
    return f" {', '.join(words)}" if words else ""


def about_view(view: View) -> str:
    """Write what the problems of a view share, and the dense contenders of its gains."""
    return about(view.lines, ["op", *fields(view.lines), "source", "scope", "cache"])


def table_of(view: View) -> Table:
    """Return the grid of a view for a terminal or for Markdown."""
    held = brackets(view.lines.gain_interval)
    return table(view.grid, "; ".join(filter(None, [about_view(view), held, "?: not settled"])))


def table(grid: Grid, title: str = "") -> Table:
    """Return a grid for a terminal or for Markdown; `?` marks a cell that is not settled.

    A narrow window leaves out the first columns, and names them.
    """
    lines: list[list[TableCell]] = [
        [row, *(_table_cell(cells.get(at)) for at in grid.columns)]
        for row, cells in grid.rows.items()
    ]
    heads = ["format", *(column_text(grid.x, at) for at in grid.columns)]
    first, others = heads[:1], heads[1:]
    return Table(
        title=title, columns=heads, lines=lines, words=first, spare=others, essential=others
    )


def _table_cell(cell: Cell | None) -> TableCell:
    if cell is None or pd.isna(cell.best["gain"]):
        return ("" if cell is None else "–"), "quiet"
    text, _ = cell_texts(cell)
    if not cell.decided:
        return f"{text}?", "unsure"
    (style,) = (STYLES[each] for each in cell.outcomes) if len(cell.outcomes) == 1 else ("",)
    return f"{text} ", style


def cell_texts(cell: Cell) -> tuple[str, str]:
    """Return the gain of a cell, or the range of several, and the interval.

    That of a range reaches from the lowest end of its intervals to the highest. Both have the
    digits of its narrowest interval, so that no end is rounded out of it.
    """
    cases = [case for case in cell.cases if pd.notna(case["gain"])]
    (gain, low, high), last = (cases[0][name] for name in ("gain", "low", "high")), cases[-1]
    if len(cases) == 1:
        half = cases[0].get("half", max(high - gain, gain - low))
        has_interval = pd.notna(low) and high > low
        text = times(gain, min(half, gain / 10)) if has_interval else times(gain)
        return text, span_text(low, high, half)
    ends = pd.DataFrame([(case["low"], case["high"]) for case in cases], columns=["low", "high"])
    least, most = ends.low.min(skipna=False), ends.high.max(skipna=False)
    half = (ends.high - ends.low).min(skipna=False) / 2
    texts = [number(end, min(end / 10, half)) for end in (last["gain"], gain)]
    return f"{'–'.join(dict.fromkeys(texts))}×", span_text(least, most, half)


def html(
    grid: Grid,
    link: Callable[[Case], str],
    caption: str | Markup,
    data: Mapping[str, Any] = MappingProxyType({}),
) -> Markup:
    """Return a grid whose cells name the kernel of their largest gain, and link to its case.

    link   the address of a case
    data   attributes of the table, for scripts
    """
    many = len(grid.columns) > ACROSS
    classes = "map many" if many else "map"
    head = Markup("").join(
        Markup('<th scope="col">{}</th>').format(column_text(grid.x, at)) for at in grid.columns
    )
    body = Markup("\n").join(
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(
            row,
            Markup("").join(
                Markup('<td data-head="{}">{}</td>').format(
                    column_text(grid.x, at),
                    _html_cell(row, at, cells.get(at), grid, link),
                )
                for at in grid.columns
            ),
        )
        for row, cells in grid.rows.items()
    )
    facts = Markup("").join(Markup(' data-{}="{}"').format(*each) for each in data.items())
    page = (
        '<figure class="map"><div class="scroll"><table class="{}"{}><thead><tr><td>{}</td>{}</tr>'
        "</thead><tbody>{}</tbody></table></div><figcaption>{}</figcaption></figure>"
    )
    return Markup(page).format(classes, facts, axis_of(grid), head, body, caption)


def axis_of(grid: Grid) -> str:
    """Name what the columns of a grid are: sparsity, tokens."""
    return AXES.get(grid.x) or grid.units.removeprefix(" of ").strip() or grid.x


def _html_cell(
    row: str, at: Any, cell: Cell | None, grid: Grid, link: Callable[[Case], str]
) -> Markup:
    if cell is None:
        return Markup('<span class="none"></span>')
    if pd.isna(cell.best["gain"]):
        return Markup('<span class="cell none">–</span>')
    text, span = cell_texts(cell)
    name = Markup("_<wbr>").join(str(cell.best["name"]).partition(" ")[0].split("_"))
    look = Markup(" <small>look</small>") if cell.best.get("verdict") is False else ""
    shown = Markup('<b>{}</b><span class="span">{}</span> {}{}').format(text, span, name, look)
    middle = median(case["gain"] for case in cell.cases if pd.notna(case["gain"]))
    title = f"{row} at {column_text(grid.x, at)}: {tooltip(cell)}"
    return shaded(middle, cell.decided, link(cell.best), title, shown)


def tooltip(cell: Cell) -> str:
    """Write the problems of a cell, each with its fastest contender, its gain and its time."""
    texts = [
        ": ".join(filter(None, [size_text(case["shape"]), f"{case['name']}, {gain_text(case)}"]))
        + f", {evidence(case)}"
        for case in cell.cases[:SHOWN]
    ]
    rest = len(cell.cases) - SHOWN
    return "; ".join([*texts, *([f"{rest} more"] if rest > 0 else [])])


def evidence(case: Mapping[Any, Any]) -> str:
    """Write a case's time, its processes, and the conditions under which they ran."""
    where = conditions(case)
    count = amount(int(case["processes"]), "process")
    return ", ".join(filter(None, [duration(case["median_us"]), count, where, case.get("day", "")]))
