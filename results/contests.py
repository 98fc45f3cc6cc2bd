"""Who wins each contest: the best of ours, the best sparse peer and the best dense contender.

    cases ─> raced     cases with a time; each is against the fastest dense one of its contest
          ─> contests  a line a contest, with columns best_*, ours_*, peer_* and dense_*

    gain      time of the fastest dense contender / time of the case, block by block and process by
              process (pairing.py). It is `speedup` where the baseline is that contender
    half      how far `gain` may be off, as `uncertainty` of a speed-up (verdict.py)
    settled   the interval of `gain` is beyond the noise floor, and the verdict says so too

A portfolio that chose a dense kernel is a dense contender.

What can be asked of a run: each choice of its fields, and the cells that answer it.

    contests ─> asked   one line a contest, with its fields: m, shape (n × k), dtype, block
             ─> views   every choice; the first is shown first

                          x: level (or m, or shape)
    fixed: bf16        ┌──────┬──────┐
    n × k 4096 × 4096  │ cell │ cell │  y: block, m or shape
                       └──────┴──────┘

A cell is one contest. Of several (files, seeds) it is the one with the median gain. Where blocks
are no rows and none is chosen, it is that of the block that gains most.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.results.analysis import CONTEST, chose_dense, uncertainty
from sparsebench.results.families import OURS, family
from sparsebench.results.formatting import plain
from sparsebench.results.frame import fields
from sparsebench.results.record import Status
from sparsebench.results.statistics import Outcome, ratio_over

SIDES = ("best", "ours", "peer", "dense")
SAID = ["ran", "name", "label", "kernel", "kind", "tile", "gain", "low", "high", "half"]
SAID += ["settled", "median_us", "outcome", "case_id"]
DECIDED = (Outcome.FASTER, Outcome.SLOWER)


def raced(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases of a summary that have a time, without twins, with more columns.

    Dense contenders are peers too; here `peer` are the sparse ones.

    side   ours, peer or dense              gain   over the fastest dense one, with low, high, half
    kind   the format                       tile   the block that the format stores
    name   of the kernel with its options   settled
    """
    found = cases[(cases.status == Status.OK) & ~cases.twin.astype(bool)].copy()
    found = found[found.median_us.notna()]
    if found.empty:
        return found
    kind = found["format"].astype(str)
    dense, own = (kind == "dense") | chose_dense(found), found.kernel.map(family).isin(OURS)
    found = found.assign(
        side=np.select([dense, own], ["dense", "ours"], "peer"),
        kind=kind,
        name=_names(found),
        tile=_tiles(found),
    )
    return _against_dense(found)


def contests(cases: pd.DataFrame) -> pd.DataFrame:
    """Return a line a contest: its fields, and the columns SAID of each of SIDES.

    `best` is the fastest sparse case, ours or a peer's. NaN stands where a side has no case.
    """
    found = raced(cases).assign(haste=lambda table: -table.median_us)
    found = found.sort_values(["gain", "haste"], ascending=False, kind="stable", na_position="last")
    places = ["op", *(n for n in fields(cases) if n != "sparsity"), "source"]
    lines = found.groupby(CONTEST, sort=False)[[*places, "level"]].first()
    sides = {side: found[found.side == side] for side in ("ours", "peer")}
    sides |= {"best": found[found.side != "dense"], "dense": found[found.side == "dense"]}
    for side in SIDES:
        first = sides[side].groupby(CONTEST, sort=False)[SAID].head(1).index
        own = sides[side].loc[first].set_index(CONTEST)[SAID].add_prefix(f"{side}_")
        lines = lines.join(own)
    return lines.reset_index()


def _names(cases: pd.DataFrame) -> pd.Series:
    """Return kernels with their options; of a portfolio that chose a dense kernel, that kernel."""
    own = cases.label.str.partition("/")[2].str.replace(r" block=\S+", "", regex=True)
    chosen = cases.chosen.astype(str).str.partition("dense, ")[2]
    return own.where(~chose_dense(cases), chosen)


def _tiles(cases: pd.DataFrame) -> pd.Series:
    """Return the block that a format stores: its own parameter, else the problem's."""
    own = cases.params.astype(str).str.extract(r"(?:^| )block=(\S+)")[0]
    blocks = own.fillna(cases.block.astype(str)).replace({"nan": "", "<NA>": "", "None": ""})
    return blocks.where(cases.format == "bsr", "")


def _against_dense(cases: pd.DataFrame) -> pd.DataFrame:
    """Add gain, low, high and settled: each case over the fastest dense one of its contest."""
    dense = cases[cases.side == "dense"]
    dense = dense.assign(rank=dense.speedup.fillna(0), haste=-dense.median_us)
    dense = dense.sort_values(["rank", "haste"], ascending=False, kind="stable")
    fastest = {tuple(line[n] for n in CONTEST): line for line in reversed(dense.to_dict("records"))}
    lines = [
        _over(line, fastest.get(tuple(line[name] for name in CONTEST)))
        for line in cases.to_dict("records")
    ]
    table = pd.DataFrame(lines, cases.index, ["gain", "low", "high", "settled"])
    half = uncertainty(table.gain, table.low, table.high, cases.floor, cases.processes)
    half = half.mask((table.low == 1) & (table.high == 1), 0.0)  # that contender itself
    return cases.assign(**{str(name): column for name, column in table.items()}, half=half)


def _over(line: dict[Any, Any], base: dict[Any, Any] | None) -> tuple[float, float, float, bool]:
    if base is None:
        return np.nan, np.nan, np.nan, False
    if line["label"] == base["label"]:
        return 1.0, 1.0, 1.0, False
    floor = 0.0 if pd.isna(line["floor"]) else line["floor"]
    if base["label"] == line["baseline_label"]:
        gain, low, high = line["speedup"], line["speedup_low"], line["speedup_high"]
        if line["outcome"] in list(Outcome):
            return gain, low, high, line["outcome"] in DECIDED
    elif found := ratio_over(line["blocks"], base["blocks"]):
        gain, low, high = found.value, found.low, found.high
    else:  # they were timed in different processes
        gain, low, high = base["median_us"] / line["median_us"], np.nan, np.nan
    return gain, low, high, bool(low > 1 + floor or high < 1 / (1 + floor))


ACROSS = ("level", "m", "shape", "block")  # x is the first of them that is swept
ROWS = ("block", "m", "shape")  # y is the one with most values
ANY = "any"
MOST = 60  # views of a page, which says how many are left out
COLUMNS = 12  # more levels than these are rounded to whole per cents


@dataclass(frozen=True)
class View:
    """One choice of the fields, and its cells.

    choice   what is chosen, as text by field: every field that varies; "all" for the rows
    x, y     the fields along and down; y is "" where there is one row
    cells    a line a cell: the columns of `contests`, `x`, `y`, `count` (contests in the cell)
    formats  a line a cell and format: kind, gain, low, high, settled
    units    what a level is a fraction of, where it is not of the weights
    """

    choice: dict[str, str]
    x: str
    y: str
    cells: pd.DataFrame
    formats: pd.DataFrame
    units: str = ""


def views(cases: pd.DataFrame) -> list[View]:
    """Return the first MOST choices of a summary's fields; none if no case has a time."""
    return every(cases)[:MOST]


def every(cases: pd.DataFrame) -> list[View]:
    """Return all choices of a summary's fields, the one that is shown first in front."""
    if raced(cases).empty:
        return []
    lines = contests(cases)
    found = asked(lines)
    x, names = across(found), _selectors(found)
    by_format = _formats(cases)
    ways = [
        View(
            choice,
            x,
            y,
            _cells(chosen, x, y, ["best_gain"]),
            _by_kind(chosen, by_format, x, y),
            " of units off" if bool(chosen.of_units.all()) else "",
        )
        for choice, y, chosen in _choices(found, x, [name for name in names if name != x])
    ]
    return sorted(ways, key=_place)


def asked(found: pd.DataFrame) -> pd.DataFrame:
    """Add `shape`; where weights have one sparsity, the level is the fraction of units off."""
    level, of_units = found.level, _of_units(found)
    if of_units.any():
        units = found.n.astype("float64")
        if "intermediate" in found:  # of a whole decoding step
            units = units.fillna(found.intermediate.astype("float64"))
        level = level.mask(of_units, 1 - found.active / units)
    digits = 2 if level.round(3).nunique() > COLUMNS else 4
    sizes = zip(found.n, found.k, strict=True)
    shape = ["" if pd.isna(n) or pd.isna(k) else f"{n} × {k}" for n, k in sizes]
    return found.assign(shape=shape, level=level.round(digits), of_units=of_units)


def _of_units(found: pd.DataFrame) -> "pd.Series[bool]":
    """Say of each line whether units are on and off, and the weights of its op have one level."""
    if "active" not in found:
        return pd.Series(False, found.index)
    weights = found.level.where(found.level.notna(), 0).round(3)
    return found.active.notna() & (weights.groupby(found.op).transform("nunique") < 2)


def across(found: pd.DataFrame) -> str:
    """Name the field along x: the first of ACROSS that varies while every other one stays."""
    names = _fields(found)
    for name in ACROSS:
        others = [n for n in names if n not in (name, "block")]
        counts = found.groupby(others, dropna=False)[name].nunique() if others else [0]
        if max(counts, default=0) > 1:
            return name
    return "level" if found.level.notna().any() else "m"


def ordered(values: "pd.Series[Any]") -> list[Any]:
    """Return distinct values: numbers and sizes by size, other text by name."""
    return sorted(values.dropna().unique(), key=_size)


def _fields(found: pd.DataFrame) -> list[str]:
    """Name the fields that were asked for, as readers choose them."""
    sizes = ("n", "k", "active", "source", "level", "problem_id", "shape", "m", "block", "op")
    own = [str(name) for name in found.columns if "_" not in str(name)]
    return ["op", "m", "shape", *(name for name in own if name not in sizes), "block"]


def _selectors(found: pd.DataFrame) -> list[str]:
    """Name the fields that vary, less those that the shape decides."""
    names = [n for n in _fields(found) if found[n].nunique(dropna=False) > 1]
    per_shape = found.groupby("shape", dropna=False)[names].nunique(dropna=False).max()
    free = found["shape"].nunique() == 1
    return [n for n in names if free or n in ("op", "m", "shape", "block") or per_shape[n] > 1]


def _choices(
    found: pd.DataFrame, x: str, names: list[str]
) -> Iterator[tuple[dict[str, str], str, pd.DataFrame]]:
    """Yield each choice, its rows and its contests."""
    given = [name for name in names if name not in ROWS]
    groups = found.groupby(given, sort=False, dropna=False) if given else [((), found)]
    for key, group in groups:
        values = dict(zip(given, map(plain, key), strict=True))
        rows = [n for n in names if n in ROWS and group[n].nunique() > 1]
        for y in sorted(rows, key=lambda n: -group[n].nunique()) or [""]:
            rest = [name for name in names if name in ROWS and name != y]
            for picked in product(*(_options(group, name) for name in rest)):
                chosen = group
                for name, value in zip(rest, picked, strict=True):
                    chosen = chosen if value == ANY else chosen[chosen[name].map(plain) == value]
                if chosen.empty or (y and chosen[y].nunique() < 2):
                    continue
                own = {n: "all" if n == y else dict(zip(rest, picked, strict=True)).get(n, "")
                       for n in names if n in ROWS}  # fmt: skip
                yield {n: {**values, **own}[n] for n in names}, y, chosen


def _options(group: pd.DataFrame, name: str) -> list[str]:
    """Return the values of a field; a block may be any: it is a choice of the user's."""
    found = [plain(value) for value in ordered(group[name])]
    return [ANY, *found] if name == "block" and len(found) > 1 else found


def _cells(found: pd.DataFrame, x: str, y: str, gains: list[str]) -> pd.DataFrame:
    """Return a line a cell: the median one of equal blocks, and of all blocks the best.

    `gains` are the column of the gain, and others that split a cell.
    """
    rows = found[y] if y else ""
    narrow = found[[*gains[1:], "block"]].assign(x=found[x], y=rows, gain_=found[gains[0]])
    narrow = narrow[narrow.x.notna()].sort_values("gain_", kind="stable", na_position="first")
    place = ["x", "y", *gains[1:]]
    groups = narrow.groupby([*place, "block"], sort=False, dropna=False)
    counts, known = groups.x.transform("size"), groups.gain_.transform("count")
    median = (counts - known + (known - 1) // 2).clip(upper=counts - 1)
    middle = narrow[groups.cumcount() == median]
    best = middle.groupby(place, sort=False, dropna=False).tail(1)
    cells = found.loc[best.index].assign(x=best.x, y=best.y, count=counts.reindex(best.index))
    return cells.reset_index(drop=True)


def _formats(cases: pd.DataFrame) -> pd.DataFrame:
    """Return a line a contest and sparse format: the best case of that format."""
    found = raced(cases)
    found = found[(found.side != "dense") & found.gain.notna()]
    best = found.sort_values("gain", ascending=False, kind="stable")
    return best.drop_duplicates([*CONTEST, "kind"])[
        [*CONTEST, "kind", "gain", "low", "high", "settled"]
    ]


def _by_kind(chosen: pd.DataFrame, formats: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    places = [*CONTEST, *dict.fromkeys(name for name in (x, y, "block") if name)]
    return _cells(chosen[places].merge(formats, on=CONTEST), x, y, ["gain", "kind"])


def _place(view: View) -> tuple[bool, bool, bool, int, bool]:
    """Sort views: the forward product, kernel time with a cold cache, most cells, bf16."""
    choice, names = view.choice, ("op", "scope", "cache", "dtype")
    op, scope, cache, dtype = (choice.get(name, "") for name in names)
    others = op not in ("", "linear"), scope not in ("", "kernel"), cache not in ("", "cold")
    return *others, -len(view.cells), dtype not in ("", "bf16")


def _size(value: Any) -> tuple[float, float, str]:
    """Sort numbers by size, `16x32` and `4096 × 64` by area, other text by name after them."""
    if not isinstance(value, str):
        return 0, float(value), ""
    parts = value.replace("×", "x").replace(" ", "").split("x")
    if all(part.isdigit() for part in parts):
        sizes = [float(part) for part in parts]
        return 0, float(np.prod(sizes * (2 if len(sizes) == 1 else 1))), value
    return 1, 0, value
