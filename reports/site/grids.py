"""What the pages of a site tabulate: how fast each format is, and from which sparsity on it pays.

    gains   m × sparsity: each format over dense, of the block that gains most, for one GPU
    pays    format and block × m: between which levels of sparsity it overtakes dense
    cases   every case of a format or a kernel, over all runs

Contests with equal m, sparsity and block (shapes, runs) share a cell, which shows their range.
Formats are each held against dense and not against each other: most have problems of their own.
A cell has verdicts alone where there are any; else it is marked as a look.
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from sparsebench.results.contests import ordered
from sparsebench.results.formatting import (
    FORMATS,
    amount,
    between,
    duration,
    interval,
    listed,
    percent,
    plain,
    rounded,
    times,
)

LEVELS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)  # that the first page shows, where they were measured
COLUMNS = 6
MOST_M = 8  # rows of the first page
SHOWN = 4  # contests that a cell lists
OP, DTYPE = "linear", "bf16"  # of the first page, where they were measured
ANYWHERE = "on zeros anywhere"  # blocks of a pattern without blocks


@dataclass(frozen=True)
class Cell:
    """A line in a cell: what it shows, what it says on hover, and the run that it is from.

    `span` is the interval of `text`. `lost`: dense is faster. `look`: there is no verdict.
    """

    head: str
    text: str
    title: str
    run: str
    span: str = ""
    lost: bool = False
    decided: bool = True
    look: bool = False


@dataclass(frozen=True)
class Grid:
    """A table whose columns have headings; `rows` are a heading and the lines of each cell."""

    kind: str
    op: str
    dtype: str
    about: str
    columns: list[str]
    rows: list[tuple[str, list[list[Cell]]]]


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


def trusted(lines: pd.DataFrame, place: list[str]) -> pd.DataFrame:
    """Leave out the looks of each place that has a verdict."""
    known = lines.groupby(place, dropna=False).verdict.transform("any")
    return lines[lines.verdict | ~known.astype(bool)]


def gains(lines: pd.DataFrame) -> Grid | None:
    """Return each format's speed-up over dense at each m and sparsity; None where none is known.

    Formats that are never faster are left out, and named, unless none is ever faster.
    """
    found = chosen(lines[lines.side != "dense"])
    found = found[found.level.notna() & found.gain.notna() & found.m.notna()]
    if found.empty:
        return None
    won = found.kind.isin(found.kind[found.gain > 1])
    lost = [named(str(kind)) for kind in found.kind[~won].unique()] if won.any() else []
    found = found[won] if won.any() else found
    found = found.assign(level=found.level.round(2), m=found.m.astype(int))
    contests = found.drop_duplicates(["run", "place"])
    levels = _most(contests.level, [x for x in LEVELS if x in set(contests.level)], COLUMNS)
    tokens = _most(contests.m, [m for m in (16, 4096) if m in set(contests.m)], MOST_M)
    place = ["m", "level", "kind"]
    found = trusted(found[found.level.isin(levels) & found.m.isin(tokens)], place)
    cells: dict[tuple[Any, Any], list[Cell]] = {}
    for (m, level, _), group in found.groupby(place, sort=False):
        cells.setdefault((m, level), []).append(_gain(group))
    rows = [(f"m {m}", [cells.get((m, level), []) for level in levels]) for m in tokens]
    about = f"{', '.join(_same(found))}, kernel time. {dated(found)}"
    if lost:
        about += f" Nowhere faster than dense: {listed(lost)}."
    return Grid("gains", *_same(found), about, [percent(level) for level in levels], rows)


def pays(found: pd.DataFrame) -> Grid | None:
    """Return from which sparsity on each format and block is faster than dense, by m."""
    found = chosen(found)
    if found.empty:
        return None
    tokens = _most(found.m.astype(float), [], COLUMNS)
    sizes = pd.to_numeric(found.block, errors="coerce").where(found.kind == "bsr")
    found = found.assign(m=found.m.astype(int), size=sizes)
    found = found.assign(block=found.block.where(found.kind == "bsr", ""))
    place = ["kind", "size", "block"]
    found = trusted(found[found.m.isin(tokens)], [*place, "m"])
    rows, never = [], []
    for (kind, _, block), group in found.groupby(place, dropna=False):
        head = f"{named(str(kind))} {ANYWHERE if block == '1' else block}".strip()
        if group.faster.isna().all():
            never.append(head)
            continue
        cells = [[_pays(own, head)] if len(own := group[group.m == m]) else [] for m in tokens]
        rows.append((head, cells))
    about = f"{', '.join(_same(found))}. {dated(found)}"
    if never:
        about += f" Not faster at any sparsity measured: {listed(never)}."
    return Grid("pays", *_same(found), about, [f"m {m:g}" for m in tokens], rows)


def dated(lines: pd.DataFrame) -> str:
    """Say in how many processes and when: `Verdicts: 8 processes, 2026-11-23 to 2026-11-24.`."""
    said = []
    for name, own in (("Verdicts", lines[lines.verdict]), ("Looks", lines[~lines.verdict])):
        if len(own):
            count = _span(own.processes)
            days = " to ".join(dict.fromkeys([own.day.min(), own.day.max()]))
            said.append(f"{name}: {count} process{'' if count == '1' else 'es'}, {days}.")
    return " ".join(said)


def cases(lines: pd.DataFrame) -> list[dict[str, str | bool]]:
    """Return a line a case for a page, the largest gain first."""
    ranked = lines.sort_values("gain", ascending=False, na_position="last", kind="stable")
    found: list[dict[str, Any]] = [*ranked.to_dict("records")]  # type: ignore[list-item]
    return [
        {
            **{name: str(line[name]) for name in ("gpu", "run", "name_of_run", "name")},
            "problem": _problem(line),
            "level": percent(line["level"]),
            "time": duration(line["median_us"]),
            "gain": between(line["gain"], line["low"], line["high"]),
            "wins": bool(line["wins"]),
            "of": _of(line),
        }
        for line in found
    ]


def best_places(lines: pd.DataFrame) -> list[str]:
    """Return a sentence a GPU: in how many contests these lines win, and the largest gain."""
    said = []
    for gpu, own in lines.groupby("gpu", sort=False):
        contests = len(own.drop_duplicates(["run", "place"]))
        won = own[own.wins]
        line = f"{gpu}: the fastest in {len(won)} of {amount(contests, 'contest')}"
        if len(won) and won.gain.notna().any():
            top = won.sort_values("gain", kind="stable", na_position="first").iloc[-1]
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


def _gain(found: pd.DataFrame) -> Cell:
    """Return what a cell says of a format: of the block that gains most in its median contest."""
    ranked = found.sort_values("gain", ascending=False, kind="stable")
    best = ranked.drop_duplicates(["run", "place", "tile"])
    tile = best.groupby("tile", sort=False).gain.median().idxmax()
    own: list[dict[str, Any]] = [*best[best.tile == tile].to_dict("records")]  # type: ignore[list-item]
    top = own[0]
    head = f"{named(top['kind'])} {tile}".strip()
    each = [
        f"n × k {line['shape']}: {line['name']}, "
        f"{between(line['gain'], line['low'], line['high'])}, {_of(line)}"
        for line in own[:SHOWN]
    ]
    decided = all(line["decided"] for line in own)
    title = f"{head} at {percent(top['level'])}: {_few(each, len(own))}"
    text, span = _range(own)
    return Cell(
        head,
        text,
        title + ("" if decided else "; within the noise"),
        str(top["run"]),
        span,
        lost=top["gain"] <= 1,
        decided=decided,
        look=not top["verdict"],
    )


def _range(own: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the range of several contests' gains; of one its gain and its interval."""
    gain, low, high = (own[0][name] for name in ("gain", "low", "high"))
    if len(own) > 1:
        ends = dict.fromkeys([rounded(own[-1]["gain"]), rounded(gain)])
        return f"{'–'.join(ends)}×", ""
    if pd.isna(low) or high <= low:
        return times(gain), ""
    half = max(high - gain, gain - low)
    return times(gain, min(half, gain / 10)), f"[{interval(low, high, half)}]"


def _of(line: dict[str, Any]) -> str:
    return f"{amount(line['processes'], 'process')}, {line['day']}"


def _same(lines: pd.DataFrame) -> tuple[str, str]:
    op, dtype = lines[["op", "dtype"]].iloc[0]
    return str(op), str(dtype)


def _span(values: "pd.Series[Any]") -> str:
    return " to ".join(dict.fromkeys([f"{values.min():g}", f"{values.max():g}"]))


def _few(shown: list[str], count: int) -> str:
    return "; ".join([*shown, *([f"{count - len(shown)} more"] if count > len(shown) else [])])


def _pays(own: pd.DataFrame, name: str) -> Cell:
    """Return one cell of `pays`: the measured levels between which dense is overtaken.

    50–80 %: slower at 50 %, faster from 80 % on. ≤ 80 %: in some problems faster at every level,
    in all from 80 % on. > 50 %: in some problems not faster up to the last level.
    """
    low = None if own.slower.isna().any() else percent(own.slower.min())
    high = None if own.faster.isna().any() else percent(own.faster.max())
    if low and high:
        text = f"{low.removesuffix(' %')}–{high}"
    else:
        text = f"> {low}" if low else f"≤ {high}" if high else "varies"
    lines: list[dict[str, Any]] = [*own.to_dict("records")]  # type: ignore[list-item]
    each = [f"n × k {line['shape']}: {_between(line)}, {_of(line)}" for line in lines[:SHOWN]]
    title = f"{name} against dense: {_few(each, len(lines))}"
    decided, verdict = bool(own.decided.all()), bool(own.verdict.all())
    return Cell(text, "", title, str(own.run.iloc[0]), decided=decided, look=not verdict)


def _between(line: dict[str, Any]) -> str:
    if pd.isna(line["slower"]):
        return f"already faster at {percent(line['faster'])}"
    if pd.isna(line["faster"]):
        return f"not faster up to {percent(line['slower'])}"
    return f"overtakes between {percent(line['slower'])} and {percent(line['faster'])}"


def _most(values: "pd.Series[Any]", wanted: list[float], count: int) -> list[float]:
    """Return the wanted values, then the most frequent ones up to a count, in order."""
    often = [value for value in values.value_counts().index if value not in wanted]
    return ordered(pd.Series([*wanted, *often][:count]))
