"""The grid of a site: how fast each format is over dense, by sparsity, and what follows from it.

                    50 %    80 %    90 %     best other        a cell: the gain of the fastest
    blocks of 128   1.71×   3.66×   5.52×    torch_bsr 3.53×   kernel of the format, or its range
    2:4             1.5–1.6×                                   over shapes and patterns
    CSR             0.02×   0.05×   0.08×

A row is a format, with its block size if it stores blocks; the row with the largest gain comes
first. In each problem, the run counts that has the most contenders, then the most processes, then
the latest date. A cell shows only verdicts if there are any; otherwise it is marked as a look.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.reports.figures._svg import shade
from sparsebench.results.formatting import (
    FORMATS,
    amount,
    between,
    blocks_text,
    cell_times,
    conditions,
    duration,
    join_words,
    number,
    percent,
    plain,
    size_text,
    span_text,
    times,
)
from sparsebench.results.problem_names import problem_name
from sparsebench.results.tables.contests import sort_values_of
from sparsebench.results.tables.families import QUANTISED
from sparsebench.results.tables.frame import records

LEVELS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)  # the preferred columns
COLUMNS = 7
TOKENS = (1, 16, 64, 4096)  # the preferred choices of the first page
SHOWN = 4  # contests in the tooltip of a cell
OP, DTYPE = "linear", "bf16"  # op and dtype of a grid, if they were measured
USUAL = 0.9  # the sparsity at which the best other kernel is named
HALF = "half 2:4"  # half of each weight is 2:4 and half is dense
DOUBTS = ("Only for some shapes", "Not settled", "No")  # why a row does not win
PLACE = ("op", "dtype", "m", "shape", "pattern", "block")  # in the name of a problem
PROBLEM = ["op", "dtype", "pattern", "m", "shape", "level", "block"]


@dataclass(frozen=True)
class Cell:
    """The gain of a row at a sparsity: its text, interval and tooltip, and where it leads.

    run, case  where it leads: the case of its largest gain, on the page of its run
    colours  of the cell and of its text         look  there is no verdict
    wins     whether every gain in it is above 1, beyond the noise; `loses` is the reverse
    """

    text: str
    span: str
    title: str
    run: str
    case: str
    colours: tuple[str, str]
    wins: bool
    loses: bool
    decided: bool
    look: bool


@dataclass(frozen=True)
class Line:
    """A row: its head, its cells by column, and the best competing kernel with its gain."""

    head: str
    kind: str
    tile: str
    cells: list[Cell | None]
    rival: str


@dataclass(frozen=True)
class Grid:
    """A table, what its cells share, run and case of its largest gain, its number of problems."""

    op: str
    dtype: str
    tokens: int
    about: str
    columns: list[float]
    lines: list[Line]
    best: str
    best_case: str
    problems: int

    @property
    def heads(self) -> list[str]:
        return [percent(level) for level in self.columns]

    @property
    def finding(self) -> str:
        """Answer in sentences from which sparsity on each row is faster than dense."""
        wins: dict[str, list[Line]] = {}
        others: dict[str, list[Line]] = {}
        for line in self.lines:
            level = self._wins_from(line)
            if level is None:
                others.setdefault(_doubt(line), []).append(line)
            else:
                wins.setdefault(level, []).append(line)
        parts = [f"{_heads(lines)}{level}" for level, lines in wins.items()]
        looks = all(cell.look for line in self.lines for cell in line.cells if cell)
        yes = f"{'Probably' if looks else 'Yes'}: {'; '.join(parts)}." if parts else ""
        rest = [f"{word}: {_heads(others[word])}." for word in DOUBTS if word in others]
        return " ".join(filter(None, [yes, *rest]))

    def _wins_from(self, line: Line) -> str | None:
        """Return from which measured level on a row wins: ` from 50 % on`; None if it does not."""
        cells = [(at, cell) for at, cell in zip(self.columns, line.cells, strict=True) if cell]
        first = len(cells)
        while first and cells[first - 1][1].wins:
            first -= 1
        if first == len(cells):
            return None
        return f" from {percent(cells[first][0])} sparsity on" if len(cells) > 1 else ""


Record = dict[str, Any]
"""A line of a card (cards.py), with the head of its row."""


def format_name(kind: str) -> str:
    """Return the name of a format for readers."""
    return FORMATS.get(kind, kind)


def select_lines(lines: pd.DataFrame) -> pd.DataFrame:
    """Return the lines with the op and the dtype of a grid."""
    for column, preferred in (("op", OP), ("dtype", DTYPE)):
        values = lines[column].value_counts()
        if len(values):
            lines = lines[lines[column] == (preferred if preferred in values else values.index[0])]
    return lines


def grids(lines: pd.DataFrame) -> list[Grid]:
    """Return a grid for each of the usual numbers of tokens that was measured, most tokens last.

    A grid compares sparse formats with dense weights of the same bits, so QUANTISED are left out.
    """
    sparse = select_lines(lines[(lines.side != "dense") & ~lines.kind.isin(QUANTISED)])
    sparse = sparse[sparse.level.notna() & sparse.gain.notna() & sparse.m.notna()]
    if sparse.empty:
        return []
    sparse = sparse.assign(level=sparse.level.round(2), m=sparse.m.astype(int), head=_head(sparse))
    tokens = _most(sparse.m, [m for m in TOKENS if m in set(sparse.m)], len(TOKENS))
    cells = records(sparse)
    return [_grid([line for line in cells if line["m"] == m], int(m)) for m in tokens]


def coverage(lines: pd.DataFrame, drawn: Sequence[Grid]) -> str:
    """Say how many problems of these lines the grids show, and what the rest is; "" without one."""
    measured = lines[(lines.side != "dense") & lines.gain.notna()]
    total = len(measured.assign(level=measured.level.round(2)).drop_duplicates(PROBLEM))
    shown = sum(grid.problems for grid in drawn)
    if shown == total:
        return ""
    op, dtype = drawn[0].op, drawn[0].dtype
    tokens = join_words([f"{grid.tokens:,}" for grid in drawn])
    others = {"op": sorted({*measured.op} - {op}), "dtype": sorted({*measured.dtype} - {dtype})}
    named = [f"{name}s ({join_words(values)})" for name, values in others.items() if values]
    rest = ", ".join([*named, "tokens or sparsities"])
    return (
        f"These grids show {shown} of {total} measured problems: {op} in {dtype} with {tokens} "
        f"token{'' if tokens == '1' else 's'}. The rest, with other {rest}, is on"
    )


def cases(lines: pd.DataFrame) -> list[dict[str, str | bool]]:
    """Return a line per case, the largest gain first."""
    ranked = lines.sort_values("gain", ascending=False, na_position="last", kind="stable")
    return [
        {
            **{name: str(line[name]) for name in ("gpu", "run", "name_of_run", "name")},
            **{name: _text(line[name]) for name in ("op", "dtype", "shape", "pattern", "block")},
            "m": "" if pd.isna(line["m"]) else str(int(line["m"])),
            "level": percent(line["level"]),
            "time": duration(line["median_us"]),
            "gain": between(line["gain"], line["low"], line["high"]),
            "wins": bool(line["wins"]),
            "mark": line["mark"],
            "of": _of(line),
        }
        for line in records(ranked)
    ]


def best_places(lines: pd.DataFrame) -> list[str]:
    """Return a sentence per GPU: the contests that these lines win, and the largest gain."""
    sentences = []
    for gpu, group in lines.groupby("gpu", sort=False):
        contests = len(group.drop_duplicates(["run", "place"]))
        won = group[group.wins]
        line = f"{gpu}: the fastest in {len(won)} of {amount(contests, 'contest')}"
        over_dense = won[won.gain.notna() & (won.side != "dense")]
        if len(over_dense):
            top = over_dense.sort_values("gain", kind="stable").iloc[-1]
            gain = between(top.gain, top.low, top.high)
            where = f"{problem_name(dict(top), PLACE)}, {percent(top.level)}"
            line += f"; in those, up to {gain} as fast as dense ({where})"
        sentences.append(f"{line}.")
    return sentences


def beside(lines: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Return the head, the finding and the run of what no grid shows: models and attention.

    Attention of one token at a time, as in decoding, is shown only if there is no other.
    """
    attention = lines[(lines.op == "attention") & (lines.level > 0)]
    many = attention[attention.m > 1]
    findings = [
        ("Model, decoding", *_of_one_run(lines[lines.op == "decoder"], _steps)),
        ("Attention", *_of_one_run(attention if many.empty else many, _attention)),
    ]
    return [finding for finding in findings if finding[1]]


def _of_one_run(lines: pd.DataFrame, write: Callable[[pd.DataFrame], str]) -> tuple[str, str]:
    """Return what a run shows, and its name; "" without a gain.

    A verdict comes before a look, then the run with the most processes, then the newest one.
    """
    lines = lines[(lines.side != "dense") & (lines.gain > 1)]
    if lines.empty:
        return "", ""
    run = lines.sort_values(["verdict", "processes", "day", "run"], kind="stable").run.iloc[-1]
    of_run = lines[lines.run == run]
    look = "" if of_run.verdict.all() else ", a look"
    return f"{write(of_run)} ({of_run['dtype'].iloc[0]}{look})", str(run)


def _steps(steps: pd.DataFrame) -> str:
    """Write the gains of the first model: by sequences, or of several ways for one sequence."""
    steps = steps[steps["shape"] == sort_values_of(steps["shape"])[0]]
    steps = steps[steps["dtype"] == steps["dtype"].iloc[0]]
    levels = zip(steps.kind, steps.level, strict=True)
    ways = _head(steps) + ["" if kind == "spense" else f" at {percent(x)}" for kind, x in levels]
    best = steps.assign(way=ways).sort_values("gain", ascending=False)
    best = best.drop_duplicates(["way", "m"]).sort_values("m", kind="stable")
    several = best.way.nunique() > 1
    if several:
        best = best[best.m == best.m.min()]
    ends = best[["gain", "low", "high"]].to_numpy(dtype=float).tolist()
    gains = [between(*each) for each in ends]
    sequences = [f"with {amount(int(m), 'sequence')}" for m in best.m]
    about, what = (best.way, sequences[0]) if several else (sequences, best.way.iloc[0])
    parts = [f"{gain} {words}" for gain, words in zip(gains, about, strict=True)]
    return f"{best['shape'].iloc[0]}, {what}, over dense: {join_words(parts)}"


def _attention(lines: pd.DataFrame) -> str:
    """Write the largest gain of block-sparse attention at the usual sparsity."""
    top = lines[lines.level == _usual_level(lines.level)].sort_values("gain").iloc[-1]
    gain = f"{between(top.gain, top.low, top.high)} as fast as dense attention"
    place = f"{_tokens(int(top.m))}, {percent(top.level)} of the blocks masked"
    return f"{gain} with {place}, {blocks_text(top.block)}"


def _tokens(count: int) -> str:
    return f"{count:,} token{'' if count == 1 else 's'}"


def _usual_level(levels: Iterable[float]) -> float:
    return min(levels, key=lambda level: (abs(level - USUAL), level))


def _grid(sparse: Sequence[Record], tokens: int) -> Grid:
    every = pd.Series([line["level"] for line in sparse])
    levels = _most(every, [x for x in LEVELS if x in set(every)], COLUMNS)
    best = _one_run_each([line for line in sparse if line["level"] in levels])
    has_verdict = {(line["head"], line["level"]) for line in best if line["verdict"]}
    best = [b for b in best if b["verdict"] or (b["head"], b["level"]) not in has_verdict]
    by_head: dict[str, list[Record]] = {}
    for line in sorted(best, key=lambda line: str(line["head"])):
        by_head.setdefault(line["head"], []).append(line)
    lines = []
    for head, of_head in sorted(by_head.items(), key=lambda row: -_top(row[1])["gain"]):
        cells = [_cell([line for line in of_head if line["level"] == level]) for level in levels]
        kind, tile = (str(of_head[0][name]) for name in ("kind", "tile"))
        lines.append(Line(head, kind, tile, cells, _rival(of_head, sparse)))
    top = _top(best)
    op, dtype = (str(top[name]) for name in ("op", "dtype"))
    processes = _span([line["processes"] for line in best if line["verdict"] or not has_verdict])
    shapes = sort_values_of(pd.Series([line["shape"] for line in best]))
    shape = size_text(shapes[0]) if len(shapes) == 1 else amount(len(shapes), "shape")
    about = [f"{_tokens(tokens)} at once", op, dtype, shape, f"{top['cache']} cache", processes]
    where = conditions(top["on_cards"], top["limited"])
    about += [f"the largest gain was measured on {where}"] if where else []
    problems = len({tuple(str(line[name]) for name in PROBLEM) for line in best})
    words = " · ".join(filter(None, about))
    return Grid(
        op, dtype, tokens, words, levels, lines, str(top["run"]), str(top["case_id"]), problems
    )


def _top(lines: Sequence[Record]) -> Record:
    """Return the line of the largest gain, the last one of several."""
    return max(reversed(lines), key=lambda line: float(line["gain"]))


def _head(lines: pd.DataFrame) -> "pd.Series[str]":
    """Name the row of each line: blocks of 64, 2:4, half 2:4, CSR."""
    heads = [
        _row(str(kind), _text(tile), _text(block), str(pattern))
        for kind, tile, block, pattern in lines[["kind", "tile", "block", "pattern"]].values
    ]
    return pd.Series(heads, lines.index, dtype="str")


def _row(kind: str, tile: str, block: str, pattern: str) -> str:
    if tile not in ("", "1"):
        return f"blocks of {tile}" if tile == block else f"zeros anywhere in blocks of {tile}"
    return HALF if pattern.startswith("spense_") else format_name(kind)


def _one_run_each(sparse: Sequence[Record]) -> list[Record]:
    """Keep the best kernel of each row in each problem, from the run that counts."""
    rivals = Counter((line["run"], line["place"]) for line in sparse)

    def rank(line: Record) -> tuple[Any, ...]:
        count = rivals[line["run"], line["place"]]
        return line["verdict"], count, line["processes"], line["day"], line["gain"]

    best: dict[tuple[str, ...], Record] = {}
    for line in sorted(sparse, key=rank, reverse=True):
        best.setdefault(tuple(str(line[name]) for name in ("head", *PROBLEM)), line)
    return [*best.values()]


def _cell(lines: Sequence[Record]) -> Cell | None:
    if not lines:
        return None
    shown = sorted(lines, key=lambda line: float(line["gain"]), reverse=True)
    top, last = shown[0], shown[-1]
    tooltips = [
        ": ".join(filter(None, [size_text(line["shape"]), line["name"]]))
        + f", {between(line['gain'], line['low'], line['high'])}, {_of(line)}"
        for line in shown[:SHOWN]
    ]
    text, span = _range(shown)
    decided = all(line["decided"] for line in shown)
    more = [f"{len(shown) - SHOWN} more"] if len(shown) > SHOWN else []
    return Cell(
        text,
        span,
        f"{top['head']} at {percent(top['level'])}: {'; '.join([*tooltips, *more])}",
        str(top["run"]),
        str(top["case_id"]),
        shade(median(line["gain"] for line in shown)),
        wins=last["gain"] > 1 and decided,
        loses=top["gain"] < 1,
        decided=decided,
        look=not top["verdict"],
    )


def _rival(best: Sequence[Record], sparse: Sequence[Record]) -> str:
    """Return the best kernel of the other side in the problem of the row's usual cell."""
    level = _usual_level(line["level"] for line in best)
    top = _top([line for line in best if line["level"] == level])
    same = [b for b in sparse if all(b[name] == top[name] for name in ("run", "place", "head"))]
    others = [line for line in same if line["side"] != top["side"]]
    if not others:
        return ""
    rival = _top(others)
    gain = between(rival["gain"], rival["low"], rival["high"])
    return f"{rival['name']} {gain} at {percent(level)}"


def _range(records: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the range of several gains, or a single one, and the interval.

    That of a range reaches from the lowest end of its intervals to the highest. Both have the
    digits of its narrowest interval, so that no end is rounded out of it.
    """
    gain, low, high = (records[0][name] for name in ("gain", "low", "high"))
    if len(records) > 1:
        lows, highs = np.array([[line["low"], line["high"]] for line in records]).T
        least, most, half = lows.min(), highs.max(), (highs - lows).min() / 2  # NaN if any is
        ends = [number(end, min(end / 10, half)) for end in (records[-1]["gain"], gain)]
        return f"{'–'.join(dict.fromkeys(ends))}×", span_text(least, most, half)
    if pd.isna(low) or high <= low:
        return times(gain), ""
    half = max(high - gain, gain - low)
    return cell_times(gain, half), span_text(low, high, half)


def _text(value: Any) -> str:
    text = plain(value)
    return "" if text in ("nan", "None") else text


def _of(line: dict[str, Any]) -> str:
    where = conditions(line["on_cards"], line["limited"])
    words = [amount(line["processes"], "process"), where, line["day"]]
    return ", ".join(filter(None, words))


def _span(values: Sequence[int]) -> str:
    ends = dict.fromkeys([f"{min(values):g}", f"{max(values):g}"])
    return f"{' to '.join(ends)} process{'' if max(values) == 1 else 'es'}"


def _doubt(line: Line) -> str:
    """Return why a row does not win, by its cell of the most zeros."""
    last = [cell for cell in line.cells if cell][-1]
    some, open_, no = DOUBTS
    return open_ if not last.decided else no if last.loses else some


def _heads(lines: Sequence[Line]) -> str:
    """Name rows together: blocks of 32, 64 and 128; 2:4."""
    sizes = [line.tile for line in lines if line.head == f"blocks of {line.tile}"]
    others = [line.head for line in lines if line.head != f"blocks of {line.tile}"]
    blocks = [f"blocks of {join_words(sort_values_of(pd.Series(sizes)))}"] if sizes else []
    return join_words([*blocks, *others])


def _most(values: "pd.Series[Any]", preferred: list[float], count: int) -> list[float]:
    """Return the preferred values, or if there is none the most frequent ones, in order."""
    often = [] if preferred else list(values.value_counts().index)
    return sort_values_of(pd.Series([*preferred, *often][:count]))
