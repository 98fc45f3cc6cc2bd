"""What the pages of a site tabulate: which format wins where, and from which sparsity on.

    winners   m × sparsity: the format that wins, of the block that gains most, for one GPU
    pays      format and block × m: the least sparsity at which it is faster than dense
    cases     every case of a format or a kernel, over all runs

Contests with equal m, sparsity and block (shapes, runs) share a cell, which shows their range.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any

import pandas as pd

from sparsebench.results.views import ordered
from sparsebench.results.words import FORMATS, between, duration, percent, plain, times

LEVELS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)  # that the first page shows, where they were measured
COLUMNS = 6
MOST_M = 8  # rows of the first page
SHOWN = 4  # contests that a cell lists
OP, DTYPE = "linear", "bf16"  # of the first page, where they were measured


@dataclass(frozen=True)
class Cell:
    """A cell of a table: what it shows, what it says on hover, and the run that it is from."""

    head: str
    text: str
    title: str
    run: str
    kind: str = ""
    settled: bool = True


@dataclass(frozen=True)
class Grid:
    """A table whose columns have headings; `rows` are a heading and a cell a column, or None."""

    about: str
    columns: list[str]
    rows: list[tuple[str, list[Cell | None]]]


def named(kind: str) -> str:
    """Name a format as readers do."""
    return FORMATS.get(kind, kind)


def chosen(lines: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of the op and the dtype that the first page shows."""
    for column, wanted in (("op", OP), ("dtype", DTYPE)):
        values = lines[column].value_counts()
        if len(values):
            lines = lines[lines[column] == (wanted if wanted in values else values.index[0])]
    return lines


def winners(lines: pd.DataFrame) -> Grid | None:
    """Return which format wins at each m and sparsity; None where nothing was measured."""
    found = chosen(lines)
    won = found[found.wins & found.level.notna() & found.gain.notna() & found.m.notna()]
    if won.empty:
        return None
    won = won.assign(level=won.level.round(2), m=won.m.astype(int))
    levels = _most(won.level, [level for level in LEVELS if level in set(won.level)], COLUMNS)
    tokens = _most(won.m, [m for m in (16, 4096) if m in set(won.m)], MOST_M)
    groups: dict[tuple[float, float], list[dict[str, Any]]] = {}
    for line in won[won.level.isin(levels)].to_dict("records"):
        groups.setdefault((line["m"], line["level"]), []).append({**line})  # type: ignore[dict-item]
    cells = {key: _winner(group) for key, group in groups.items()}
    rows = [(f"m {m}", [cells.get((m, level)) for level in levels]) for m in tokens]
    same = won[["op", "dtype"]].iloc[0]
    about = f"{same['op']}, {same['dtype']}, kernel time, against the fastest dense kernel"
    return Grid(about, [percent(level) for level in levels], rows)


def pays(found: pd.DataFrame) -> Grid | None:
    """Return from which sparsity on each format and block is faster than dense, by m."""
    found = chosen(found)
    if found.empty:
        return None
    tokens = _most(found.m.astype(float), [], COLUMNS)
    sizes = pd.to_numeric(found.block, errors="coerce").where(found.kind == "bsr")
    found = found.assign(m=found.m.astype(int), size=sizes)
    found = found.assign(block=found.block.where(found.kind == "bsr", ""))
    rows = []
    for (kind, _, block), group in found.groupby(["kind", "size", "block"], dropna=False):
        head = f"{named(str(kind))} {block}".strip()
        cells = [_pays(own, head) if len(own := group[group.m == m]) else None for m in tokens]
        rows.append((head, cells))
    same = found[["op", "dtype"]].iloc[0]
    never = [
        head for head, cells in rows if all(c is None or c.head.startswith(">") for c in cells)
    ]
    about = f"{same['op']}, {same['dtype']}"
    if never:
        about += f". Not faster at any sparsity measured: {'; '.join(never)}"
    kept = [(head, cells) for head, cells in rows if head not in never]
    return Grid(about, [f"m {m:g}" for m in tokens], kept)


def cases(lines: pd.DataFrame) -> list[dict[str, str | bool]]:
    """Return a line a case for a page, the largest gain first."""
    ranked = lines.sort_values("gain", ascending=False, na_position="last", kind="stable")
    found: list[dict[str, Any]] = [*ranked.to_dict("records")]  # type: ignore[list-item]
    return [
        {
            **{name: str(line[name]) for name in ("gpu", "run", "suite", "kernel", "name")},
            "problem": _problem(line),
            "level": percent(line["level"]),
            "time": duration(line["median_us"]),
            "gain": between(line["gain"], line["low"], line["high"]),
            "wins": bool(line["wins"]),
        }
        for line in found
    ]


def best_places(lines: pd.DataFrame) -> list[str]:
    """Return a sentence a GPU: in how many contests these lines win, and the largest gain."""
    said = []
    for gpu, own in lines.groupby("gpu", sort=False):
        contests = len(own.drop_duplicates(["run", "place"]))
        won = own[own.wins]
        line = f"{gpu}: the fastest in {len(won)} of {contests} contests"
        if len(won) and won.gain.notna().any():
            top = won.loc[won.gain.idxmax()]
            line += f"; {times(top.gain)} at most, {_problem(top)}, {percent(top.level)}"
        said.append(f"{line}.")
    return said


def _problem(line: Any) -> str:
    """Write the fields of a line for a reader: linear, bf16, m 16, n × k 4096 × 4096."""
    known = {name: plain(line[name]) for name in ("op", "dtype", "shape", "pattern", "block")}
    known = {name: "" if text in ("nan", "None") else text for name, text in known.items()}
    tokens = "" if pd.isna(line["m"]) else f"m {int(line['m'])}"
    block = f"blocks of {known['block']}" if known["block"] not in ("", "1") else ""
    pattern = known["pattern"] if known["pattern"] not in ("dense", "blocks") else ""
    shape = f"n × k {known['shape']}" if known["shape"] else ""
    return ", ".join(filter(None, [known["op"], known["dtype"], tokens, shape, pattern, block]))


def _winner(group: list[dict[str, Any]]) -> Cell:
    """Return the cell of one m and level: of the block whose median contest gains most."""
    blocks: dict[str, list[dict[str, Any]]] = {}
    for line in sorted(group, key=lambda line: -float(line["gain"])):
        blocks.setdefault(str(line["block"]), []).append(line)
    own = max(blocks.values(), key=lambda lines: median(line["gain"] for line in lines))
    top, dense = own[0], own[0]["side"] == "dense"
    tile = f" {top['tile']}" if top["kind"] == "bsr" and top["tile"] else ""
    head, low, high = f"{named(top['kind'])}{tile}", f"{own[-1]['gain']:.2g}", f"{top['gain']:.2g}"
    settled = dense or all(line["settled"] for line in own if line["side"] != "dense")
    each = [
        f"n × k {line['shape']}: {line['name']}, {between(line['gain'], line['low'], line['high'])}"
        for line in own[:SHOWN]
    ]
    title = f"{head} at {percent(top['level'])}: {_few(each, len(own))}"
    text = "" if dense else times(top["gain"]) if low == high else f"{low}–{high}×"
    unsure = "" if settled else "; not settled"
    return Cell(head, text, title + unsure, str(top["run"]), str(top["kind"]), settled)


def _few(shown: list[str], count: int) -> str:
    return "; ".join([*shown, *([f"{count - len(shown)} more"] if count > len(shown) else [])])


def _pays(own: pd.DataFrame, name: str) -> Cell:
    """Return one cell of `pays`: 64 %, ≤50 %, >99 %, or the range over shapes and runs.

    ≤50: already at the lowest level measured. >99: not up to the highest.
    """
    lows = [(level, _digits(level)) for level in own.level.dropna()]
    highs = list(lows)
    lows += [(f, f"≤{_digits(f)}") for f in own["first"][own.text.str.startswith("≤")]]
    highs += [(last, f">{_digits(last)}") for last in own["last"][own.text.str.startswith(">")]]
    ends = [min(lows)[1]] if lows else []
    ends += [max(highs)[1]] if highs else []
    lines = zip(own["shape"], own.block, own.text, strict=True)
    each = [f"n × k {s}{f', blocks of {b}' if b else ''}: {text}" for s, b, text in lines]
    said = _few(each[:SHOWN], len(each))
    title, text = f"{name} is faster than dense from: {said}", "–".join(dict.fromkeys(ends))
    return Cell(f"{text} %", "", title, str(own.run.iloc[0]), settled=bool(own.settled.all()))


def _digits(level: float) -> str:
    """Write a level in percent with two significant digits of its density: 64, 98.6."""
    return percent(1 - float(f"{1 - level:.2g}") if level < 1 else level).removesuffix(" %")


def _most(values: "pd.Series[Any]", wanted: list[float], count: int) -> list[float]:
    """Return the wanted values, then the most frequent ones up to a count, in order."""
    often = [value for value in values.value_counts().index if value not in wanted]
    return ordered(pd.Series([*wanted, *often][:count]))
