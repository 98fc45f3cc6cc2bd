"""The answer of a run in sentences, for the page, the terminal and the site.

    badges      LOOK: 3 processes · SIMULATED · UNRELIABLE · BUSY MACHINE, each with its reason
    where       bf16 · m 4096 · n × k 4096 × 4096 · against dense (cublas, 163 µs)
    sentences   BSR beats dense: blocks of 16 from a point between 50 % and 80 %; blocks of 32, 64
                and 128 already at 50 %.
                At 90 %: BSR in blocks of 128, bsr_wgmma, 5.58× [5.54, 5.60], 29.3 µs; ...

Every function is pure: of a view (views.py), of cases, or of a run's environment. A gain is over
the fastest dense contender of the same contest (contests.py). Dense winning is a sentence too.
Only levels that were measured are said: nothing between two of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import pandas as pd

from sparsebench.results.analysis import CONTEST
from sparsebench.results.contests import ANY, View, ordered, views
from sparsebench.results.formatting import (
    FORMATS,
    amount,
    between,
    duration,
    listed,
    percent,
    plain,
    times,
)
from sparsebench.results.noise import Noise, Reliability
from sparsebench.results.record import Status
from sparsebench.results.statistics import FEWEST

MOST = 4  # answers of a run, each of its own op or pattern
ASKED = {"level": (0.5, 0.9), "m": (16, 4096)}  # what readers ask about, where it was measured


class Badge(StrEnum):
    """How much a run can say, in a word."""

    VERDICT = "VERDICT"
    LOOK = "LOOK"
    SIMULATED = "SIMULATED"
    UNRELIABLE = "UNRELIABLE"
    BUSY = "BUSY MACHINE"
    UNFINISHED = "NOT FINISHED"
    EMPTY = "NO TIMES"


@dataclass(frozen=True)
class BreakEven:
    """From which level on a format is faster than dense, in one row of a view.

    `slower` is the last measured level at which it is slower: NaN where there is none. `faster` is
    the first one from which on it is faster: NaN where it is slower at the last one. `settled`:
    these levels are beyond the noise.
    """

    kind: str
    row: Any
    slower: float
    faster: float
    settled: bool


def badges(
    cases: pd.DataFrame,
    noise: Noise,
    environment: Mapping[str, Any],
    state: Mapping[str, Any] = MappingProxyType({}),
) -> list[tuple[Badge, str]]:
    """Return the badges of a run with their reasons, the gravest first; `state` is its run.json."""
    word, why = noise.reliability
    found = []
    if "sim" in environment:
        found.append((Badge.SIMULATED, "No GPU ran: a model of one made these times."))
    if word is Reliability.UNRELIABLE:
        found.append((Badge.UNRELIABLE, why))
    if busy := "; ".join(unfit(state)):
        reason = f"The machine was busy, so no number here is to be trusted: {busy}."
        found.append((Badge.BUSY, reason))
    if (status := state.get("status", "finished")) != "finished":
        found.append((Badge.UNFINISHED, f"This run is not finished: its status is {status}."))
    timed = cases[cases.median_us.notna()]
    if timed.empty:
        return [*found, (Badge.EMPTY, "No case of this run has a time.")]
    count = int(timed.processes.max())
    if count < FEWEST:
        need = f"a verdict takes {FEWEST} or more."
        return [*found, (Badge.LOOK, f"{amount(count, 'process')}: a look, no verdict; {need}")]
    return [*found, (Badge.VERDICT, f"{amount(count, 'process')}. {why}")]


def told(badge: Badge, cases: pd.DataFrame) -> str:
    """Write a badge: `LOOK: 3 processes`, `SIMULATED`."""
    if badge not in (Badge.LOOK, Badge.VERDICT):
        return badge.value
    most = int(cases[cases.median_us.notna()].processes.max())
    return f"{badge.value}: {amount(most, 'process')}"


def unfit(state: Mapping[str, Any]) -> list[str]:
    """Return what made the machine unfit before or during the run, as run.json has it."""
    fitness = state.get("fitness", {})
    return [
        f"{when} the run {finding['found']} ({finding['check']})"
        for when in ("before", "during")
        for finding in fitness.get(when, [])
        if finding["level"] == "warning"
    ]


def answers(cases: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """Return what a page shows first of each op and pattern, at most MOST: `where`, sentences.

    Where nothing sparse was measured is left out, unless there is nothing else.
    """
    first: dict[tuple[str, ...], View] = {}
    for view in views(cases):
        first.setdefault(tuple(view.choice.get(name, "") for name in ("op", "pattern")), view)
    found = [view for view in first.values() if view.cells.best_median_us.notna().any()]
    return [(where(view), sentences(view)) for view in (found or [*first.values()])[:MOST]]


def where(view: View) -> str:
    """Write what the cells of a view share: dtype, sizes, and the dense contender they are over."""
    names = [n for n in ("dtype", "m", "shape", "pattern", "block") if n not in (view.x, view.y)]
    names = ["op", *names, *(n for n in view.choice if n not in ("op", *names, view.x, view.y))]
    shared = [word(name, value) for name in names if (value := _shared(view, name))]
    return " · ".join(filter(None, [*shared, against(view)]))


def against(view: View) -> str:
    """Name the dense contenders that gains are over, and their times."""
    known = view.cells[view.cells.dense_name.notna()]
    if known.empty:
        return ""
    low, high = duration(known.dense_median_us.min()), duration(known.dense_median_us.max())
    names = listed([str(name) for name in known.dense_name.unique()])
    many = "the fastest of " if known.dense_name.nunique() > 1 else ""
    return f"against dense ({many}{names}, {low if low == high else f'{low} to {high}'})"


def sentences(view: View) -> list[str]:
    """Return the answer of a view, the most general sentence first."""
    if view.cells.empty or view.cells.best_median_us.isna().all():
        return ["No sparse contender has a time here: there is nothing to compare with dense."]
    if view.cells.best_gain.isna().all():
        return ["No dense contender has a time here: there is nothing to compare with."]
    if not (view.cells.best_gain > 1).any():
        top = view.cells.nlargest(1, "best_gain").iloc[0]
        near = f"The nearest is {contender(top, 'best')}, {_gain(top)}, {place(view, top)}."
        return [f"Nothing beats dense ({top.dense_name}) at any measured point. {near}"]
    first = _crossings(view) if view.x == "level" else _spans(view)
    return [*first, *_levels(view)]


def break_evens(view: View) -> list[BreakEven]:
    """Return from which level on each format beats dense, by row; none if x is no level."""
    if view.x != "level":
        return []
    groups = view.formats.groupby(["kind", "y"], sort=False)
    found = [_break_even(str(kind), row, cells.sort_values("x")) for (kind, row), cells in groups]
    rows = {plain(value): i for i, value in enumerate(ordered(view.formats.y))}
    return sorted(found, key=lambda each: (each.kind, rows[plain(each.row)]))


def variants(view: View, cases: pd.DataFrame) -> str:
    """Say which of a view's winners stand for the fastest of several variants; "" if none does."""
    beside = cases[(cases.status == Status.OK) & ~cases.twin.astype(bool)]
    beside = beside.merge(view.cells[CONTEST].drop_duplicates(), on=CONTEST)
    beside = beside[beside.kernel.isin(view.cells.best_kernel.dropna())]
    said = []
    several = beside.groupby([*CONTEST, "kernel"]).label.transform("nunique") > 1
    for name, own in beside[several].groupby("kernel", sort=False):
        labels = own.label.str.replace(r" block=\S+", "", regex=True)
        options = labels.str.partition(" ")[2].unique()
        if len(options) > 1:  # else they differ in the block that they store
            most = "faster" if len(options) == 2 else "fastest"
            named = listed([text or "no option" for text in options])
            said.append(f"{name}: the {most} of {named}")
    return "; ".join(said)


def place(view: View, line: Any) -> str:
    """Say where a cell is: `at 90 %, m 16`."""
    across = word(view.x, line.x) + view.units
    along = word(view.y, line.y) if view.y not in ("", "block") else ""
    return ", ".join(filter(None, [across if view.x == "level" else f"at {across}", along]))


def contender(line: Any, side: str) -> str:
    """Name the contender of one side of a cell: `BSR in blocks of 128, bsr_wgmma`."""
    kind, tile = getattr(line, f"{side}_kind"), getattr(line, f"{side}_tile")
    blocks = f" in blocks of {tile}" if tile and tile != "1" else ""
    return f"{FORMATS.get(kind, kind)}{blocks}, {getattr(line, f'{side}_name')}"


def word(name: str, value: Any) -> str:
    """Write one field for a reader: `m 16`, `n × k 4096 × 4096`, `blocks of 64`, `at 90 %`."""
    if name == "level":
        return f"at {percent(value)}"
    text = plain(value)
    if (name, text) == ("pattern", "dense"):
        return ""
    if name == "block":
        return f"{text} block" if text == ANY else f"blocks of {text}" if text else ""
    named = {"shape": f"n × k {text}", "m": f"m {text}"}
    return named.get(name, text if name in ("op", "dtype", "pattern") else f"{name} {text}")


def _shared(view: View, name: str) -> str:
    if view.choice.get(name) == ANY:
        return ANY
    if name not in view.cells:
        return ""
    values = list(view.cells[name].dropna().map(plain).unique())
    constant = len(values) == 1 and values[0] not in ("", "1" if name == "block" else "")
    return str(values[0]) if constant else ""


def _break_even(kind: str, row: Any, cells: pd.DataFrame) -> BreakEven:
    below = cells.x <= cells.x[cells.gain < 1].max()  # nowhere, where the greatest of none is NaN
    near = [cells[below].tail(1), cells[~below].head(1)]
    slower, faster = (float(side.x.max()) for side in near)
    return BreakEven(
        kind, row, slower, faster, settled=all(bool(side.settled.all()) for side in near)
    )


def _crossings(view: View) -> list[str]:
    """Write a sentence a format: from which level on, equal rows together."""
    found: dict[str, dict[str, list[Any]]] = {}
    for each in break_evens(view):
        found.setdefault(each.kind, {}).setdefault(_from(view, each), []).append(each.row)
    said = []
    for kind, ways in found.items():
        name, verb = _subject(kind)
        if all(way.startswith("not") for way in ways):
            does = "do" if verb == "beat" else "does"
            said.append(
                f"{name} {does} not beat dense up to {percent(view.cells.x.max())}{view.units}."
            )
            continue
        colon = ":" if view.y else ""
        parts = [" ".join(filter(None, [_rows(view, rows), way])) for way, rows in ways.items()]
        said.append(f"{name} {verb} dense{colon} {'; '.join(parts)}.")
    return sorted(said, key=lambda text: " not beat dense up to" in text)


def _subject(kind: str) -> tuple[str, str]:
    """Return a format's name at the head of a sentence, and the verb's form after it."""
    name = FORMATS.get(kind, kind)
    return name[:1].upper() + name[1:], "beat" if name.endswith("s") else "beats"


def _from(view: View, each: BreakEven) -> str:
    unsure = "" if each.settled else " (not settled)"
    if pd.isna(each.slower):
        already = "already " if view.formats.x.nunique() > 1 else ""
        return f"{already}at {percent(each.faster)}{view.units}{unsure}"
    if pd.isna(each.faster):
        return f"not up to {percent(each.slower)}{view.units}"
    span = f"{percent(each.slower)} and {percent(each.faster)}{view.units}"
    return f"from a point between {span}{unsure}"


def _rows(view: View, rows: Sequence[Any]) -> str:
    if not view.y:
        return ""
    if len(rows) == len(view.formats.y.unique()) > 1:
        return f"every {'n × k' if view.y == 'shape' else view.y},"
    texts = listed([plain(row) for row in rows])
    return {"block": f"blocks of {texts}", "shape": f"n × k {texts}"}.get(view.y, f"m {texts}")


def _spans(view: View) -> list[str]:
    """Write where the best sparse contender beats dense, where x is no level."""
    ways: dict[str, list[Any]] = {}
    for row in ordered(view.cells.y):
        cells = view.cells[view.cells.y == row].set_index("x").best_gain
        values = [value for value in ordered(view.cells.x) if value in cells.index]
        won = [value for value in values if cells[value] > 1]
        span = (
            f"{plain(won[0])} to {plain(won[-1])}"
            if len(won) > 2
            else listed([plain(value) for value in won])
        )
        gaps = won != [v for v in values if won and won[0] <= v <= won[-1]] if view.x == "m" else 1
        span = listed([plain(value) for value in won]) if gaps else span
        name = {"shape": "n × k"}.get(view.x, view.x)
        way = "nowhere" if not won else f"at every {name}" if won == values else f"at {name} {span}"
        ways.setdefault(way, []).append(row)
    kinds = view.cells.best_kind[view.cells.best_gain > 1].map(lambda kind: FORMATS.get(kind, kind))
    names = listed([str(kind) for kind in kinds.unique()])
    parts = [" ".join(filter(None, [_rows(view, rows), way])) for way, rows in ways.items()]
    verb = "beat" if kinds.nunique() > 1 or names.endswith("s") else "beats"
    names = names[:1].upper() + names[1:]
    return [f"{names} {verb} dense{':' if view.y else ''} {'; '.join(parts)}."]


def _levels(view: View) -> list[str]:
    """Write who wins at the levels that readers ask about, and what stands beside it."""
    values = ordered(view.cells.x)
    chosen = [value for value in ASKED.get(view.x, ()) if value in values]
    if len(chosen) < 2:
        chosen = list(dict.fromkeys([values[0], *chosen, values[-1]]))
    said = []
    for value in chosen:
        cells = view.cells[view.cells.x == value]
        if view.y in ("", "block"):
            cells = cells.sort_values("best_gain").tail(1)
        else:
            rows = ordered(cells.y)
            rows = [row for row in ASKED.get(view.y, ()) if row in rows] or [rows[0], rows[-1]]
            cells = pd.concat([cells[cells.y == row] for row in dict.fromkeys(rows)])
        said += [f"{place(view, line)[:1].upper()}{place(view, line)[1:]}: {winner(line)}."
                 for _, line in cells.iterrows()]  # fmt: skip
    return said


def winner(line: "pd.Series[Any]") -> str:
    """Write who wins one cell, by how much, in which time, and what stands beside it."""
    if pd.isna(line.best_gain):
        return "no sparse contender has a time"
    beside = ""
    other = "peer" if line.best_label == line.ours_label else "ours"
    if not pd.isna(line[f"{other}_gain"]):
        named = "best sparse peer" if other == "peer" else "best of ours"
        beside = f"; {named} {line[f'{other}_name']} {_short(line, other)}"
    peer = " (a peer)" if other == "ours" else ""
    best = f"{contender(line, 'best')}{peer}"
    if line.best_gain > 1:
        unsure = "" if line.best_settled else ", not settled"
        return f"{best}, {_gain(line)}{unsure}, {duration(line.best_median_us)}{beside}"
    dense = f"dense wins, {line.dense_name}, {duration(line.dense_median_us)}"
    if not line.best_settled:
        dense = f"not settled, dense ({line.dense_name}, {duration(line.dense_median_us)})"
    return f"{dense}; nearest {best}, {_gain(line)}"


def _short(line: Any, side: str) -> str:
    return times(line[f"{side}_gain"], line[f"{side}_half"])


def _gain(line: Any) -> str:
    return between(line.best_gain, line.best_low, line.best_high, line.best_half)
