"""The tables of a site: how fast each format is, and from which sparsity on it beats dense.

    gains   m × sparsity: each format over dense, with the block that gains most, for one GPU
    pays    format and block × m: the levels of sparsity between which it overtakes dense
    cases   every case of a format or a kernel, over all runs

Contests with the same m, sparsity and block share a cell, which shows the range over shapes and
runs. Each format is compared with dense and not with other formats, because most formats have
different problems. A cell shows only verdicts if there are any; otherwise it is marked as a look.
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from sparsebench.results.contests import ordered
from sparsebench.results.formatting import (
    FORMATS,
    amount,
    between,
    blocks_text,
    duration,
    interval,
    listed,
    percent,
    plain,
    rounded,
    times,
)

LEVELS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)  # the columns of the first page, if they were measured
COLUMNS = 6
MOST_M = 8  # rows of the first page
SHOWN = 4  # contests in the tooltip of a cell
OP, DTYPE = "linear", "bf16"  # of the first page, if they were measured
ANYWHERE = "with zeros anywhere"  # the block of patterns without blocks


@dataclass(frozen=True)
class Cell:
    """A line in a cell: its text, its tooltip and its run.

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
    """A table; each row is a heading and the lines of each of its cells."""

    kind: str
    op: str
    dtype: str
    about: str
    columns: list[str]
    rows: list[tuple[str, list[list[Cell]]]]


def named(kind: str) -> str:
    """Return the name of a format for readers."""
    return FORMATS.get(kind, kind)


def chosen(lines: pd.DataFrame) -> pd.DataFrame:
    """Return the lines with the op and the dtype of the first page."""
    for column, wanted in (("op", OP), ("dtype", DTYPE)):
        values = lines[column].value_counts()
        if len(values):
            lines = lines[lines[column] == (wanted if wanted in values else values.index[0])]
    return lines


def trusted(lines: pd.DataFrame, place: list[str]) -> pd.DataFrame:
    """Drop the looks of each place that has a verdict."""
    has_verdict = lines.groupby(place, dropna=False).verdict.transform("any")
    return lines[lines.verdict | ~has_verdict.astype(bool)]


def gains(lines: pd.DataFrame) -> Grid | None:
    """Return each format's speedup over dense at each m and sparsity; None if there is none.

    Formats that are never faster are only named, unless no format is ever faster.
    """
    sparse = chosen(lines[lines.side != "dense"])
    sparse = sparse[sparse.level.notna() & sparse.gain.notna() & sparse.m.notna()]
    if sparse.empty:
        return None
    won = sparse.kind.isin(sparse.kind[sparse.gain > 1])
    lost = [named(str(kind)) for kind in sparse.kind[~won].unique()] if won.any() else []
    sparse = sparse[won] if won.any() else sparse
    sparse = sparse.assign(level=sparse.level.round(2), m=sparse.m.astype(int))
    contests = sparse.drop_duplicates(["run", "place"])
    levels = _most(contests.level, [x for x in LEVELS if x in set(contests.level)], COLUMNS)
    tokens = _most(contests.m, [m for m in (16, 4096) if m in set(contests.m)], MOST_M)
    place = ["m", "level", "kind"]
    sparse = trusted(sparse[sparse.level.isin(levels) & sparse.m.isin(tokens)], place)
    cells: dict[tuple[Any, Any], list[Cell]] = {}
    for (m, level, _), group in sparse.groupby(place, sort=False):
        cells.setdefault((m, level), []).append(_gain(group))
    rows = [(f"m {m}", [cells.get((m, level), []) for level in levels]) for m in tokens]
    about = f"{', '.join(_same(sparse))}, kernel time. {dated(sparse)}"
    if lost:
        about += f" Never faster than dense: {listed(lost)}."
    return Grid("gains", *_same(sparse), about, [percent(level) for level in levels], rows)


def pays(evens: pd.DataFrame) -> Grid | None:
    """Return the sparsity at which each format and block overtakes dense, by m."""
    evens = chosen(evens)
    if evens.empty:
        return None
    tokens = _most(evens.m.astype(float), [], COLUMNS)
    sizes = pd.to_numeric(evens.block, errors="coerce").where(evens.kind == "bsr")
    evens = evens.assign(m=evens.m.astype(int), size=sizes)
    evens = evens.assign(block=evens.block.where(evens.kind == "bsr", ""))
    place = ["kind", "size", "block"]
    evens = trusted(evens[evens.m.isin(tokens)], [*place, "m"])
    rows, never = [], []
    for (kind, _, block), group in evens.groupby(place, dropna=False):
        head = f"{named(str(kind))} {ANYWHERE if block == '1' else block}".strip()
        if group.faster.isna().all():
            never.append(head)
            continue
        cells = [[_pays(cell, head)] if len(cell := group[group.m == m]) else [] for m in tokens]
        rows.append((head, cells))
    about = f"{', '.join(_same(evens))}. {dated(evens)}"
    if never:
        about += f" Not faster at any measured sparsity: {listed(never)}."
    return Grid("pays", *_same(evens), about, [f"m {m:g}" for m in tokens], rows)


def dated(lines: pd.DataFrame) -> str:
    """Name the processes and the days: `Verdicts: 8 processes, 2026-11-23 to 2026-11-24.`."""
    parts = []
    for name, group in (("Verdicts", lines[lines.verdict]), ("Looks", lines[~lines.verdict])):
        if len(group):
            count = _span(group.processes)
            days = " to ".join(dict.fromkeys([group.day.min(), group.day.max()]))
            parts.append(f"{name}: {count} process{'' if count == '1' else 'es'}, {days}.")
    return " ".join(parts)


def cases(lines: pd.DataFrame) -> list[dict[str, str | bool]]:
    """Return a line per case, the largest gain first."""
    ranked = lines.sort_values("gain", ascending=False, na_position="last", kind="stable")
    records: list[dict[str, Any]] = [*ranked.to_dict("records")]  # type: ignore[list-item]
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
        for line in records
    ]


def best_places(lines: pd.DataFrame) -> list[str]:
    """Return a sentence per GPU: the contests that these lines win, and the largest gain."""
    sentences = []
    for gpu, group in lines.groupby("gpu", sort=False):
        contests = len(group.drop_duplicates(["run", "place"]))
        won = group[group.wins]
        line = f"{gpu}: the fastest in {len(won)} of {amount(contests, 'contest')}"
        if len(won) and won.gain.notna().any():
            top = won.sort_values("gain", kind="stable", na_position="first").iloc[-1]
            line += f"; at most {times(top.gain)}, for {_problem(top)}, {percent(top.level)}"
        sentences.append(f"{line}.")
    return sentences


def _problem(line: Any) -> str:
    """Write the fields of a line for a reader: linear, bf16, m 16, n × k 4096 × 4096."""
    fields = {name: plain(line[name]) for name in ("op", "dtype", "shape", "pattern", "block")}
    fields = {name: "" if text in ("nan", "None") else text for name, text in fields.items()}
    tokens = "" if pd.isna(line["m"]) else f"m {int(line['m'])}"
    block = blocks_text(fields["block"]) if fields["block"] not in ("", "1") else ""
    pattern = fields["pattern"] if fields["pattern"] not in ("dense", "blocks") else ""
    shape = f"n × k {fields['shape']}" if fields["shape"] else ""
    return ", ".join(filter(None, [fields["op"], fields["dtype"], tokens, shape, pattern, block]))


def _gain(records: pd.DataFrame) -> Cell:
    """Return the cell of a format, for the block with the largest median gain."""
    ranked = records.sort_values("gain", ascending=False, kind="stable")
    best = ranked.drop_duplicates(["run", "place", "tile"])
    tile = best.groupby("tile", sort=False).gain.median().idxmax()
    shown: list[dict[str, Any]] = [*best[best.tile == tile].to_dict("records")]  # type: ignore[list-item]
    top = shown[0]
    head = f"{named(top['kind'])} {tile}".strip()
    tooltips = [
        f"n × k {line['shape']}: {line['name']}, "
        f"{between(line['gain'], line['low'], line['high'])}, {_of(line)}"
        for line in shown[:SHOWN]
    ]
    decided = all(line["decided"] for line in shown)
    title = f"{head} at {percent(top['level'])}: {_few(tooltips, len(shown))}"
    text, span = _range(shown)
    return Cell(
        head,
        text,
        title + ("" if decided else "; not settled"),
        str(top["run"]),
        span,
        lost=top["gain"] <= 1,
        decided=decided,
        look=not top["verdict"],
    )


def _range(records: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the range of several gains, or a single gain and its interval."""
    gain, low, high = (records[0][name] for name in ("gain", "low", "high"))
    if len(records) > 1:
        ends = dict.fromkeys([rounded(records[-1]["gain"]), rounded(gain)])
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


def _pays(evens: pd.DataFrame, name: str) -> Cell:
    """Return a cell of `pays`: the measured levels between which the format overtakes dense.

    50–80 %   slower at 50 %, faster from 80 % on
    ≤ 80 %    faster from 80 % on in all problems, and in some at every level
    > 80 %    not faster up to 80 %, the last level, in some problems
    """
    low = None if evens.slower.isna().any() else percent(evens.slower.min())
    high = None if evens.faster.isna().any() else percent(evens.faster.max())
    if low and high:
        text = f"{low.removesuffix(' %')}–{high}"
    else:
        text = f"> {low}" if low else f"≤ {high}" if high else "varies"
    lines: list[dict[str, Any]] = [*evens.to_dict("records")]  # type: ignore[list-item]
    tooltips = [f"n × k {line['shape']}: {_between(line)}, {_of(line)}" for line in lines[:SHOWN]]
    title = f"{name} against dense: {_few(tooltips, len(lines))}"
    decided, verdict = bool(evens.decided.all()), bool(evens.verdict.all())
    return Cell(text, "", title, str(evens.run.iloc[0]), decided=decided, look=not verdict)


def _between(line: dict[str, Any]) -> str:
    if pd.isna(line["slower"]):
        return f"already faster at {percent(line['faster'])}"
    if pd.isna(line["faster"]):
        return f"not faster up to {percent(line['slower'])}"
    return f"overtakes between {percent(line['slower'])} and {percent(line['faster'])}"


def _most(values: "pd.Series[Any]", wanted: list[float], count: int) -> list[float]:
    """Return the preferred values and the most frequent others, up to a count, in order."""
    often = [value for value in values.value_counts().index if value not in wanted]
    return ordered(pd.Series([*wanted, *often][:count]))
