"""The answer of a run in sentences, for the page, the terminal and the site.

    where       bf16 · m 4096 · n × k 4096 × 4096 · against dense (cublas, 163 µs)
    sentences   BSR beats dense with 64 × 64 blocks at 50 % sparsity and above; with 16 × 16 blocks
                above some point between 50 % and 80 % sparsity.
                At 90 %: BSR with 128 × 128 blocks, bsr_wgmma, 5.58× [5.54, 5.60], 29.3 µs; ...

Every function is pure: its input is a view (contests.py) or the cases of a run. A gain is over the
fastest dense contender of the same contest. If dense wins, a sentence says so. Only measured levels
are named, and nothing is claimed between two of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sparsebench.results.formatting import (
    FORMATS,
    between,
    blocks_text,
    capital,
    conditions,
    duration,
    join_words,
    percent,
    plain,
)
from sparsebench.results.problem_names import field_text
from sparsebench.results.record import Status
from sparsebench.results.statistics.outcome import Outcome, outcome
from sparsebench.results.tables.cases import CONTEST, break_even_levels
from sparsebench.results.tables.contests import ANY, View, sort_values_of

OF_ATTENTION = ["batch", "heads", "kv_heads", "head_dim", "context", "causal"]
"""Fields that name a problem of attention, which has no shape."""

TWO_FOUR = 0.5  # sparsity of weights that are all 2:4
USUAL = 0.9  # sparsity of a headline, if it was measured
TOPIC = ("op", "pattern")
MOST = 4  # ops and patterns with an answer of their own
EXAMPLES = {"level": (0.5, 0.9), "m": (16, 4096)}  # values to report, if they were measured
WITHOUT_WIN = {
    "": "no sparse contender beats dense",
    Outcome.EQUAL: f"the best sparse contender is {Outcome.EQUAL} to dense",
    Outcome.NOT_SETTLED: f"it is {Outcome.NOT_SETTLED} whether a sparse contender beats dense",
}
"""What a row without a win shows, by the word for its undecided cells, the least certain last."""


@dataclass(frozen=True)
class BreakEven:
    """The level from which a format is faster than dense, in one row of a view.

    slower   the last measured level at which it is slower; NaN if there is none
    faster   the first level from which it stays faster; NaN if it is slower at the last one
    decided  whether the gains at these levels are beyond the noise
    sure     the first level from which all gains are beyond the noise; NaN if there is none
    """

    kind: str
    row: Any
    slower: float
    faster: float
    decided: bool
    sure: float


def answers(views: Sequence[View]) -> list[tuple[str, list[str]]]:
    """Return `where` and `sentences` of each of `first_views`."""
    return [(where(view), sentences(view)) for view in first_views(views)]


def first_views(views: Sequence[View]) -> list[View]:
    """Return the first view of each dtype, for at most MOST pairs of op and pattern.

    Views without a sparse time or without a dense one are left out, unless there are no others.
    """
    first: dict[tuple[str, ...], View] = {}
    for view in views:
        first.setdefault(tuple(view.choice.get(name, "") for name in (*TOPIC, "dtype")), view)
    chosen = [*first.items()]
    for column in ("best_median_us", "best_gain"):
        chosen = [each for each in chosen if each[1].cells[column].notna().any()] or chosen
    topics = [*dict.fromkeys(key[: len(TOPIC)] for key, _ in chosen)][:MOST]
    return [view for key, view in chosen if key[: len(TOPIC)] in topics]


def where(view: View) -> str:
    """Write what the cells of a view share: dtype, sizes, and their dense contender."""
    sizes = ["shape"] if _shared(view, "shape") or "shape" in (view.x, view.y) else OF_ATTENTION
    names = [n for n in ("dtype", "m", *sizes, "pattern", "block") if n not in (view.x, view.y)]
    names = ["op", *names, *(n for n in view.choice if n not in ("op", *names, view.x, view.y))]
    shared = [field_text(name, value) for name in names if (value := _shared(view, name))]
    return " · ".join(filter(None, [*shared, _shared_level(view), against(view)]))


def against(view: View) -> str:
    """Write the dense contenders that gains are over, and their times."""
    cells = view.cells[view.cells.dense_name.notna()]
    if cells.empty:
        return ""
    low, high = duration(cells.dense_median_us.min()), duration(cells.dense_median_us.max())
    names = join_words([str(name) for name in cells.dense_name.unique()])
    many = "the fastest of " if cells.dense_name.nunique() > 1 else ""
    return f"against dense ({many}{names}, {low if low == high else f'{low} to {high}'})"


def sentences(view: View) -> list[str]:
    """Return the answer of a view, the most general sentence first."""
    wins = bool((view.cells.best_gain > 1).any())
    return [*general_sentences(view), *(_examples(view) if wins else [])]


def general_sentences(view: View) -> list[str]:
    """Return where each format beats dense; each names the op, pattern and dtype if they vary."""
    names = (*TOPIC, "dtype")
    topic = [field_text(name, view.choice[name]) for name in names if name in view.choice]
    lines = []
    for line in _general(view):
        about = [text for text in topic if text and not line.lower().startswith(text)]
        lines.append(f"{', '.join(about)}: {line}" if about else line)
    return lines


def break_evens(view: View) -> list[BreakEven]:
    """Return the break-even of each format and row; none if x is not the level."""
    if view.x != "level":
        return []
    groups = view.formats.groupby(["kind", "y"], sort=False)
    levels = [_break_even(str(kind), row, cells.sort_values("x")) for (kind, row), cells in groups]
    rows = {plain(value): i for i, value in enumerate(sort_values_of(view.formats.y))}
    return sorted(levels, key=lambda each: (each.kind, rows[plain(each.row)]))


def variants(view: View, cases: pd.DataFrame) -> str:
    """Say which of a view's winners are the fastest of several variants; "" if none is."""
    others = cases[(cases.status == Status.OK) & ~cases.twin.astype(bool)]
    others = others.merge(view.cells[CONTEST].drop_duplicates(), on=CONTEST)
    others = others[others.kernel.isin(view.cells.best_kernel.dropna())]
    texts = []
    many_labels = others.groupby([*CONTEST, "kernel"]).label.transform("nunique") > 1
    for name, group in others[many_labels].groupby("kernel", sort=False):
        labels = group.label.str.replace(r" block=\S+", "", regex=True)
        options = labels.str.partition(" ")[2].unique()
        if len(options) > 1:  # else they differ in the block that they store
            most = "faster" if len(options) == 2 else "fastest"
            named = join_words([text or "no option" for text in options])
            texts.append(f"{name}: the {most} of {named}")
    return "; ".join(texts)


def place(view: View, line: Any) -> str:
    """Write the place of a cell: `at 90 %, m 16`, or `at m 64, 99.5 % of units off`."""
    row = field_text(view.y, line.y) if view.y not in ("", "block") else ""
    return ", ".join(filter(None, [column_text(view, line), row]))


def column_text(view: View, line: Any) -> str:
    """Write the column of a cell, and its sparsity if `where` cannot: `at m 16, 25 %`."""
    column = field_text(view.x, line.x)
    if view.x == "level":
        return column + view.units
    level = "" if _shared_level(view) or not line.level > 0 else percent(line.level) + view.units
    start = "with" if view.x == "block" else "at"
    return f"{start} {', '.join(filter(None, [column, level]))}"


def headline(view: View) -> "pd.Series[Any] | None":
    """Return the cell with the largest gain, at 90 % sparsity if it was measured.

    The gain of a short call is the one inside a chain, as `evidence` writes it.
    """
    cells = view.cells[view.cells.best_gain.notna()]
    if cells.empty:
        return None
    chosen = cells[cells.x == USUAL] if view.x == "level" else cells
    among = cells if chosen.empty else chosen
    gains = among.chain_gain.fillna(among.best_gain).astype(float)
    largest: pd.Series[Any] = among.loc[gains.sort_values().index[-1]]
    return largest


def headline_side(line: Any) -> str:
    """Return the side of a cell that is its headline: `chain` for a short call (contests.py)."""
    return "best" if pd.isna(line.chain_gain) else "chain"


def evidence(view: View) -> tuple[str, str]:
    """Return the headline's gain, and its place, kernels, times and share of the hardware limit."""
    line = headline(view)
    if line is None:
        return "", ""
    gain, text = _headline_text(view, line)
    if "dtype" in view.choice:
        text = f"in {view.choice['dtype']}, {text}"
    isolated = ", isolated" if headline_side(line) == "chain" else ""
    text += f" Dense{isolated}: {line.dense_name}, {duration(line.dense_median_us)}."
    other = "peer" if line.best_label == line.ours_label else "ours"
    if not pd.isna(line[f"{other}_gain"]):
        who = "Best other sparse kernel" if other == "peer" else "Best of ours"
        text += f" {who}{isolated}: {line[f'{other}_name']}, {_gain(line, other)}."
    if where := conditions(line.best_on_cards, line.best_limited):
        text += f" This case was measured on {where}."
    return gain, text


def other_dtypes(views: Sequence[View]) -> list[str]:
    """Return the headline of each other dtype of the first view's op and pattern, as a sentence."""
    texts = []
    for view in first_views(views):
        line = headline(view)
        same = all(view.choice.get(name) == views[0].choice.get(name) for name in TOPIC)
        if line is None or not same or view.choice.get("dtype") == views[0].choice.get("dtype"):
            continue
        sizes = [n for n in ("m", "shape") if view.choice.get(n) != views[0].choice.get(n)]
        place_of = [view.choice["dtype"]]
        place_of += [field_text(n, view.choice[n]) for n in sizes if view.choice[n] != "all"]
        texts.append(f"In {', '.join(place_of)}: {' '.join(_headline_text(view, line))}")
    return texts


def _headline_text(view: View, line: Any) -> tuple[str, str]:
    """Return the gain of a headline, and its place, contender, time and share of the limit."""
    side = headline_side(line)
    blocks = "" if view.x == "block" else field_text("block", line.best_tile)
    who = " with ".join(filter(None, [format_text(line.best_kind, [line.level]), blocks]))
    gain, word = _gain(line, side), headline_word(line)
    gain = f"{word}, best sparse {gain}" if word else gain
    text = f"{place(view, line)}: {who}, {line.best_name}, "
    if side == "chain":
        text += f"{duration(line.chain_median_us)} inside a chain; isolated {_gain(line)}, "
    text += duration(line.best_median_us)
    if not pd.isna(line.best_of_bound):
        text += f", {100 * line.best_of_bound:.0f} % of the hardware limit"
    return gain, f"{text}."


def headline_word(line: Any) -> str:
    """Return "" if a headline's sparse contender wins, "Dense wins", or why neither is sure."""
    wins = line[f"{headline_side(line)}_gain"] > 1
    if headline_side(line) == "best" and not line.best_decided:
        return capital(_hedge(line))
    return "" if wins else "Dense wins"


def contender(line: Any, side: str) -> str:
    """Write the contender of one side of a cell: `BSR with 128 × 128 blocks, bsr_wgmma`."""
    kind, tile = getattr(line, f"{side}_kind"), getattr(line, f"{side}_tile")
    blocks = f" with {blocks_text(tile)}" if tile and tile != "1" else ""
    return f"{format_text(kind, [line.level])}{blocks}, {getattr(line, f'{side}_name')}"


def format_text(kind: str, levels: Iterable[float]) -> str:
    """Name a format at some levels: 2:4 beside dense weights is not called 2:4."""
    parts = {*levels} if kind == "spense" else set()
    if not parts or not max(parts) < TWO_FOUR:
        return FORMATS.get(kind, kind)
    return "half 2:4" if parts == {TWO_FOUR / 2} else "partly 2:4"


def winner(line: "pd.Series[Any]") -> str:
    """Write the winner of one cell, its gain and time, and the best of the other side."""
    if pd.isna(line.best_gain):
        return "no sparse contender has a time"
    other = "peer" if line.best_label == line.ours_label else "ours"
    peer = " (a peer)" if other == "ours" else ""
    best = f"{contender(line, 'best')}{peer}"
    dense = f"dense ({line.dense_name}, {duration(line.dense_median_us)})"
    if line.best_gain <= 1:
        if not line.best_decided:
            return f"{dense} against {best}: {_hedge(line)}, {_gain(line)}"
        return f"{dense} wins; the nearest is {best}, {_gain(line)}"
    beside = ""
    if not pd.isna(line[f"{other}_gain"]):
        side = "the best competing sparse kernel" if other == "peer" else "the best of ours"
        beside = f"; {side} is {line[f'{other}_name']}, {_gain(line, other)}"
    open_ = "" if line.best_decided else f" ({_hedge(line)})"
    return f"{best}, {_gain(line)}{open_}, {duration(line.best_median_us)}{beside}"


def _hedge(line: "pd.Series[Any]") -> str:
    """Return the word for a winner whose gain is not decided."""
    is_equal = outcome(line.best_low, line.best_high) is Outcome.EQUAL
    return str(Outcome.EQUAL if is_equal else Outcome.NOT_SETTLED)


def _general(view: View) -> list[str]:
    if view.cells.empty or view.cells.best_median_us.isna().all():
        return ["No sparse contender has a time here, so nothing can be compared with dense."]
    if view.cells.best_gain.isna().all():
        return ["No dense contender has a time here, so there is no gain over dense."]
    if not (view.cells.best_gain > 1).any():
        top = view.cells.nlargest(1, "best_gain").iloc[0]
        open_ = "" if top.best_decided else f" ({_hedge(top)})"
        near = f"The nearest is {contender(top, 'best')}, {_gain(top)}{open_}, {place(view, top)}."
        return [f"Nothing beats dense ({top.dense_name}) at any measured point. {near}"]
    return _crossings(view) if view.x == "level" else _spans(view)


def _shared(view: View, name: str) -> str:
    if view.choice.get(name) == ANY:
        return ANY
    if name not in view.cells:
        return ""
    values = list(view.cells[name].dropna().map(plain).unique())
    constant = len(values) == 1 and values[0] not in ("", "1" if name == "block" else "")
    return str(values[0]) if constant else ""


def _shared_level(view: View) -> str:
    """Write the sparsity of all cells, if it is one, is not 0 and no column says it."""
    levels = view.cells.level.dropna().unique()
    if view.x == "level" or len(levels) != 1 or not levels[0] > 0:
        return ""
    return percent(levels[0]) + (view.units or " sparsity")


def _break_even(kind: str, row: Any, cells: pd.DataFrame) -> BreakEven:
    slower, faster = break_even_levels(cells.x, cells.gain)
    decided = cells.decided[cells.x.isin([slower, faster])].all()
    won = cells[cells.x >= faster]  # none if it is NaN
    sure = won.x[won.decided[::-1].astype(bool).cummin()[::-1]].min()
    return BreakEven(kind, row, slower, faster, bool(decided), sure)


def _crossings(view: View) -> list[str]:
    """Write the level above which each format beats dense, with equal rows together."""
    won: dict[str, dict[str, list[Any]]] = {}
    lost: dict[str, dict[str, list[Any]]] = {}
    for each in break_evens(view):
        ways = (lost if pd.isna(each.faster) else won).setdefault(each.kind, {})
        ways.setdefault(_level(view, each), []).append(each.row)
    names = {
        str(kind): format_text(str(kind), cells.x) for kind, cells in view.formats.groupby("kind")
    }
    lines = []
    for kind, ways in won.items():
        parts = [" ".join(filter(None, [_rows(view, rows), way])) for way, rows in ways.items()]
        name = names[kind]
        lines.append(f"{capital(name)} {_verb(name, 'beat')} dense {'; '.join(parts)}.")
    for kind, ways in lost.items():
        name = names[kind]
        for way, rows in ways.items():
            whole = kind not in won and len(ways) == 1
            subject = name if whole else f"{_rows(view, rows)} {name}"
            stay = _verb(name, "stay")
            lines.append(f"{capital(subject.strip())} {stay} slower than dense {way}.")
    return lines


def _level(view: View, each: BreakEven) -> str:
    noise = "" if each.decided else f" ({Outcome.NOT_SETTLED})"
    units = view.units or " sparsity"
    if pd.isna(each.faster):
        return f"up to {percent(each.slower)}{units}"
    if pd.isna(each.slower):
        if not each.decided and not pd.isna(each.sure):
            unsettled = f"at {percent(each.faster)} it is {Outcome.NOT_SETTLED}"
            return f"at {percent(each.sure)}{units} and above ({unsettled})"
        above = " and above" if view.formats.x.nunique() > 1 else ""
        return f"at {percent(each.faster)}{units}{above}{noise}"
    ends = f"{percent(each.slower)} and {percent(each.faster)}{units}"
    return f"above some point between {ends}{noise}"


def _rows(view: View, rows: Sequence[Any]) -> str:
    """Write rows of a view; "" if it has one."""
    return _places(view.y, rows, list(view.formats.y.unique())) if view.y else ""


def _places(name: str, values: Sequence[Any], every: Sequence[Any]) -> str:
    """Write values of a field: `with 16 × 16 and 32 × 32 blocks`, `at m = 16`, `at every n × k`."""
    named = {"shape": "n × k"}.get(name, name)
    if len(values) == len(every) > 1:
        return "with every block size" if name == "block" else f"at every {named}"
    if name == "block":
        sizes = [blocks_text(value).removesuffix(" blocks") for value in values]
        return f"with {join_words(sizes)} blocks"
    return f"at {named} = {join_words([plain(value) for value in values])}"


def _spans(view: View) -> list[str]:
    """Write where the best sparse contender beats dense beyond the noise, if x is not the level."""
    ways: dict[tuple[str, str, str], list[Any]] = {}
    for row in sort_values_of(view.cells.y):
        cells = view.cells[(view.cells.y == row) & view.cells.best_gain.notna()]
        won, open_ = cells[_sure(cells)], cells[~cells.best_decided.astype(bool)]
        hedges = [_hedge(line) for _, line in open_.iterrows()]
        word = max(hedges, key=list(WITHOUT_WIN).index, default="")
        key = _span(view, cells, won), _span(view, cells, open_), word
        ways.setdefault(key, []).append(row)
    wins = view.cells[_sure(view.cells)]
    kinds = wins.best_kind.astype(str)
    names = join_words([format_text(k, wins.level[kinds == k]) for k in kinds.unique()])
    verb = "beat" if kinds.nunique() > 1 else _verb(names, "beat")
    parts, rest = [], []
    for (way, open_way, word), rows in ways.items():
        at = _rows(view, rows)
        if way:
            beside = f" ({word} {open_way})" if open_way else ""
            parts.append(" ".join(filter(None, [at, way])) + beside)
        else:
            place = capital(", ".join(filter(None, [at, open_way])))
            rest.append(f"{place} {WITHOUT_WIN[word]}.")
    return [*([f"{capital(names)} {verb} dense {'; '.join(parts)}."] if parts else []), *rest]


def _sure(cells: pd.DataFrame) -> "pd.Series[bool]":
    """Return in which cells the best sparse contender beats dense beyond the noise."""
    return (cells.best_gain > 1) & cells.best_decided.astype(bool)


def _span(view: View, cells: pd.DataFrame, chosen: pd.DataFrame) -> str:
    """Write the columns of the chosen cells of a row: `at m = 16 to 4096`; "" if there are none."""
    values, every = sort_values_of(chosen.x), sort_values_of(cells.x)
    if not values:
        return ""
    ends = [value for value in every if values[0] <= value <= values[-1]]
    if view.x == "m" and 2 < len(values) < len(every) and values == ends:
        return f"at m = {plain(values[0])} to {plain(values[-1])}"
    return _places(view.x, values, every)


def _verb(name: str, verb: str) -> str:
    """Return the verb's form after a format's name: plural after `column vectors`."""
    return verb if name.endswith("s") else f"{verb}s"


def _examples(view: View) -> list[str]:
    """Write the winners at the values that readers look for, or at the ends."""
    values = sort_values_of(view.cells.x)
    chosen = [value for value in EXAMPLES.get(view.x, ()) if value in values]
    if len(chosen) < 2:
        chosen = list(dict.fromkeys([values[0], *chosen, values[-1]]))
    lines = []
    for value in chosen:
        cells = view.cells[view.cells.x == value]
        if view.y in ("", "block"):
            cells = cells.sort_values("best_gain").tail(1)
        else:
            rows = sort_values_of(cells.y)
            rows = [row for row in EXAMPLES.get(view.y, ()) if row in rows] or [rows[0], rows[-1]]
            cells = pd.concat([cells[cells.y == row] for row in dict.fromkeys(rows)])
        for _, line in cells.iterrows():
            lines.append(f"{capital(place(view, line))}: {winner(line)}.")
    return lines


def _gain(line: Any, side: str = "best") -> str:
    return between(*(getattr(line, f"{side}_{end}") for end in ("gain", "low", "high", "half")))
