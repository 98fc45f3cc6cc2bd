"""The fastest contenders of each contest, and grids of contests for every choice of fields.

    cases ─> with_gains    cases with a time, each with its gain over the fastest dense contender
          ─> contests      a line per contest, with columns best_*, ours_*, peer_* and dense_*
          ─> with_shapes   the same, with shape (n × k) and level
          ─> views         a grid for every choice of the fields; a page shows the first one first

    gain     time of the fastest dense contender / time of the case, round by round and process by
             process; it equals `speedup` if the baseline is that contender
    half     the uncertainty of `gain`, like that of a speedup (cases.py)
    decided  the interval of `gain` is beyond the noise floor, and the verdict agrees

A portfolio that chose a dense kernel counts as a dense contender.

Two events around an isolated call also enclose the start of its first kernel, 2 to 5 µs, which
pulls ratios of short calls towards 1. Nothing is subtracted. If such a call or its dense contender
takes less than SHORT_US, and the run also timed it inside a chain, that gain is the headline
(`chain_*`), followed by the isolated time.

                          x: level (or m, or shape)
    fixed: bf16        ┌──────┬──────┐
    n × k 4096 × 4096  │ cell │ cell │  y: block, m or shape
                       └──────┴──────┘

A cell shows one contest. Of several (files, seeds), it shows the one with the median gain, and of
several blocks, if no block is chosen and y is not the block, the one with the largest gain.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.results.ceilings import Ceilings
from sparsebench.results.formatting import duration, plain
from sparsebench.results.model_shapes import model_name
from sparsebench.results.record import Status
from sparsebench.results.statistics.outcome import DIFFERENT, VERDICTS
from sparsebench.results.statistics.ratio import ratio_over
from sparsebench.results.tables.cases import CONTEST, chose_dense, uncertainty
from sparsebench.results.tables.families import DEFAULT, by_default, is_ours
from sparsebench.results.tables.frame import fields, records

SIDES = ("best", "ours", "peer", "dense")
OF_SIDE = ["ran", "name", "label", "kernel", "kind", "tile", "gain", "low", "high", "half"]
OF_SIDE += ["decided", "median_us", "of_bound", "outcome", "case_id", "on_cards", "limited"]
IN_CHAIN = ["gain", "low", "high", "half", "median_us"]
# A gain is computed from these columns.
NEEDED = [*CONTEST, "label", "baseline_label", "floor", "outcome", "speedup", "speedup_low"]
NEEDED += ["speedup_high", "interval", "blocks", "median_us", "between"]
ACROSS = ("level", "m", "shape", "block")  # x is the first of these that is swept
ROWS = ("block", "m", "shape")  # y is the one with the most values
OF_MODEL = ["hidden", "intermediate", "layers"]  # fields that name a model
ANY = "any"
MOST = 60  # views on a page, which says how many it leaves out
SHORT_US = 20.0
COLUMNS = 12  # more levels than these are rounded to whole percents


@dataclass(frozen=True)
class View:
    """One choice of the fields, and its grid.

    choice   the chosen value of every field that varies, as text; "all" for the rows
    x, y     the fields of the columns and rows; y is "" if there is one row
    cells    a line per cell: the columns of `contests`, `x`, `y`, `count` (contests in the cell)
    formats  a line per cell and format: kind, gain, low, high, decided
    units    what a level is a fraction of, if not of the weights
    """

    choice: dict[str, str]
    x: str
    y: str
    cells: pd.DataFrame
    formats: pd.DataFrame
    units: str = ""


def with_gains(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases of a summary that have a time, without twins, with more columns.

    side   ours, peer or dense (`peer` are sparse ones only)
    kind   the format
    name   the kernel with its options
    tile   the block that the format stores
    gain   over the fastest dense contender, with low, high, half, decided and `gain_interval`,
           the text of `interval` (cases.py) for the gain
    """
    timed = cases[(cases.status == Status.OK) & ~cases.twin.astype(bool)].copy()
    timed = timed[timed.median_us.notna()]
    if timed.empty:
        return timed
    kind = timed["format"].astype(str)
    dense, ours = (kind == "dense") | chose_dense(timed), timed.kernel.map(is_ours).astype(bool)
    side = np.select([dense, ours], ["dense", "ours"], "peer")
    return _with_gains(timed.assign(side=side, kind=kind, name=_names(timed), tile=_tiles(timed)))


def usual(timed: pd.DataFrame) -> pd.DataFrame:
    """Return the cases of the measure to show first: isolated and cold if the run has it."""
    isolated = timed[timed.scope == "kernel"] if (timed.scope == "kernel").any() else timed
    cold = isolated[isolated.cache == "cold"]
    return isolated if cold.empty else cold


def in_chain(case: Mapping[Any, Any], timed: pd.DataFrame) -> Mapping[Any, Any]:
    """Return the row of a short case inside a chain, or any other case unchanged."""
    same = timed[timed.case_id == case["case_id"]]
    chained = same[(same.scope == "chain") & (same.cache == case["cache"])]
    return dict(chained.iloc[0]) if is_short(case) and len(chained) else case


def is_short(case: Mapping[Any, Any]) -> bool:
    """Return whether a case or its baseline takes less than SHORT_US as an isolated call."""
    shorter_us = case["median_us"] * min(1.0, case["speedup"] if case["speedup"] > 0 else 1.0)
    return bool(case["scope"] == "kernel" and shorter_us < SHORT_US)


def empty_launch(environment: Mapping[str, Any], cases: pd.DataFrame) -> list[str]:
    """Report the time of an empty launch if a run timed short isolated calls on a GPU."""
    isolated = (cases.scope == "kernel") & (cases.clock != "host") & (cases.median_us < SHORT_US)
    if not (isolated.any() and environment.get("ceilings")):
        return []
    floor = duration(Ceilings.from_json(environment["ceilings"]).launch_us)
    sentence = f"An empty launch takes {floor}, the floor of every isolated call"
    return [f"{sentence}. Nothing is subtracted from times."]


def contests(timed: pd.DataFrame) -> pd.DataFrame:
    """Return a line per contest of `with_gains`: its fields, and OF_SIDE of each of SIDES.

    `best` is the fastest sparse case, ours or a peer's. A side without a case has NaN. `chain_*`
    are the columns IN_CHAIN of `best` inside a chain, if it is short.
    """
    places = ["op", *(n for n in fields(timed) if n != "sparsity"), "source", "level"]
    columns = dict.fromkeys([*CONTEST, "side", *places, *OF_SIDE, *IN_CHAIN])
    timed = timed[[*columns]].assign(rate=-timed.median_us)
    timed = timed.sort_values(["gain", "rate"], ascending=False, kind="stable", na_position="last")
    lines = timed.groupby(CONTEST, sort=False)[places].first()
    sides = {side: timed[timed.side == side] for side in ("ours", "peer")}
    sides |= {"best": timed[timed.side != "dense"], "dense": timed[timed.side == "dense"]}
    for side in SIDES:
        first = sides[side].groupby(CONTEST, sort=False)[OF_SIDE].head(1).index
        fastest = sides[side].loc[first].set_index(CONTEST)[OF_SIDE]
        lines = lines.join(fastest.add_prefix(f"{side}_"))
    lines = lines.reset_index()
    chained = timed[timed.scope == "chain"].set_index(["case_id", "cache"])[IN_CHAIN]
    shorter_us = lines[["best_median_us", "dense_median_us"]].min(axis=1)
    short = (lines.scope == "kernel") & (shorter_us < SHORT_US)
    isolated = pd.MultiIndex.from_frame(lines[["best_case_id", "cache"]])
    chained = chained.reindex(isolated).set_axis(lines.index)
    return lines.join(chained.where(short).add_prefix("chain_"))


def with_shapes(lines: pd.DataFrame) -> pd.DataFrame:
    """Add `shape` to contests: n × k, or the name of a model.

    If weights have one sparsity, level is the share of units off.
    """
    level, of_units = lines.level, _of_units(lines)
    if of_units.any():
        units = lines.n.astype("float64")
        if "intermediate" in lines:  # a decoding step
            units = units.fillna(lines.intermediate.astype("float64"))
        level = level.mask(of_units, 1 - lines.active / units)
    digits = 2 if level.round(3).nunique() > COLUMNS else 4
    sizes = zip(lines.n, lines.k, strict=True)
    shape = ["" if pd.isna(n) or pd.isna(k) else f"{n} × {k}" for n, k in sizes]
    if {*OF_MODEL} <= {*lines}:
        models = lines[OF_MODEL].to_numpy(dtype=float, na_value=np.nan).tolist()
        shape = [
            text if np.isnan(model[0]) else model_name(*map(int, model))
            for text, model in zip(shape, models, strict=True)
        ]
    return lines.assign(shape=shape, level=level.round(digits), of_units=of_units)


def views(timed: pd.DataFrame) -> list[View]:
    """Return the views of cases with gains for all choices of fields, the first to show in front.

    There is none if no case has a time.
    """
    if timed.empty:
        return []
    lines = with_shapes(contests(timed))
    x, names = across(lines), _selectors(lines)
    by_format = _best_of_formats(timed)
    unsorted = [
        View(
            choice,
            x,
            y,
            _cells(chosen, x, y, ["best_gain"]),
            _cells_of_formats(chosen, by_format, x, y),
            " of units off" if bool(chosen.of_units.all()) else "",
        )
        for choice, y, chosen in _choices(lines, x, [name for name in names if name != x])
    ]
    return sorted(unsorted, key=_rank)


def across(lines: pd.DataFrame) -> str:
    """Return the field along x: the first of ACROSS that varies while every other one is fixed."""
    names = _fields(lines)
    for name in ACROSS:
        others = [n for n in names if n not in (name, "block")]
        counts = lines.groupby(others, dropna=False)[name].nunique() if others else [0]
        if max(counts, default=0) > 1:
            return name
    return "level" if lines.level.notna().any() else "m"


def sort_values_of(values: "pd.Series[Any]") -> list[Any]:
    """Return the distinct values: numbers and sizes by size, other text by name."""
    return sorted(values.dropna().unique(), key=size_key)


def _names(cases: pd.DataFrame) -> pd.Series:
    """Return kernels with their options; for a portfolio, the dense kernel that it chose.

    A contender without a kernel runs the kernel that a layer would choose, and has its name.
    """
    names = cases.label.str.partition("/")[2].str.replace(r" block=\S+", "", regex=True)
    chosen = cases.chosen.astype(str).str.partition("dense, ")[2]
    names = names.where(~chose_dense(cases), chosen)
    users = cases[cases.kernel == DEFAULT]
    named = [
        by_default(name, json.loads(choice or "{}"))
        for name, choice in zip(users["format"], users.choice, strict=True)
    ]
    names.loc[users.index] = pd.Series(named, users.index, dtype="str")
    return names


def _tiles(cases: pd.DataFrame) -> pd.Series:
    """Return the block that a format stores: its own parameter, else the problem's."""
    stored = cases.params.astype(str).str.extract(r"(?:^| )block=(\S+)")[0]
    blocks = stored.fillna(cases.block.astype(str)).replace({"nan": "", "<NA>": "", "None": ""})
    return blocks.where(cases.format == "bsr", "")


def _with_gains(cases: pd.DataFrame) -> pd.DataFrame:
    """Add gain, low, high, half and decided, over the fastest dense case of each contest."""
    dense = cases[cases.side == "dense"]
    dense = dense.assign(rank=dense.speedup.fillna(0), rate=-dense.median_us)
    dense = dense.sort_values(["rank", "rate"], ascending=False, kind="stable")[NEEDED]
    fastest = {tuple(line[n] for n in CONTEST): line for line in reversed(records(dense))}
    lines = [
        _gain(line, fastest.get(tuple(line[name] for name in CONTEST)))
        for line in records(cases[NEEDED])
    ]
    names = ["gain", "low", "high", "decided", "gain_interval"]
    table = pd.DataFrame(lines, cases.index, names)
    half = uncertainty(table.gain, table.low, table.high, cases.floor, cases.processes)
    half = half.mask((table.low == 1) & (table.high == 1), 0.0)  # the fastest dense case itself
    return cases.assign(**{str(name): column for name, column in table.items()}, half=half)


def _gain(
    line: dict[Any, Any], base: dict[Any, Any] | None
) -> tuple[float, float, float, bool, str]:
    """Return gain, low, high, decided and gain_interval of a case over the fastest dense one."""
    if base is None:
        return np.nan, np.nan, np.nan, False, ""
    if line["label"] == base["label"]:
        return 1.0, 1.0, 1.0, False, ""
    floor = 0.0 if pd.isna(line["floor"]) else line["floor"]
    if base["label"] == line["baseline_label"]:
        gain, low, high = line["speedup"], line["speedup_low"], line["speedup_high"]
        name = line["interval"]
        if line["outcome"] in VERDICTS:
            return gain, low, high, line["outcome"] in DIFFERENT, name
    elif ratio := ratio_over(line["blocks"], base["blocks"], line["between"]):
        gain, low, high = ratio.value, ratio.low, ratio.high
        name = ratio.interval_kind.over(ratio.processes, line["between"] > 0)
    else:  # they were timed in different processes
        gain, low, high, name = base["median_us"] / line["median_us"], np.nan, np.nan, ""
    return gain, low, high, bool(low > 1 + floor or high < 1 / (1 + floor)), name


def _of_units(lines: pd.DataFrame) -> "pd.Series[bool]":
    """Return which lines have active units, in an op whose weights have a single level."""
    if "active" not in lines:
        return pd.Series(False, lines.index)
    weights = lines.level.where(lines.level.notna(), 0).round(3)
    return lines.active.notna() & (weights.groupby(lines.op).transform("nunique") < 2)


def _fields(lines: pd.DataFrame) -> list[str]:
    """Return the fields that a reader can choose."""
    sizes = ("n", "k", "active", "source", "level", "problem_id", "shape", "m", "block", "op")
    single = [str(name) for name in lines.columns if "_" not in str(name)]
    return ["op", "m", "shape", *(name for name in single if name not in sizes), "block"]


def _selectors(lines: pd.DataFrame) -> list[str]:
    """Return the fields that vary, without those that the shape determines."""
    names = [n for n in _fields(lines) if lines[n].nunique(dropna=False) > 1]
    per_shape = lines.groupby("shape", dropna=False)[names].nunique(dropna=False).max()
    free = lines["shape"].nunique() == 1
    return [n for n in names if free or n in ("op", "m", "shape", "block") or per_shape[n] > 1]


def _choices(
    lines: pd.DataFrame, x: str, names: list[str]
) -> Iterator[tuple[dict[str, str], str, pd.DataFrame]]:
    """Yield each choice, its rows and its contests.

    Contests that are beside no others, such as the only m of a shape, follow in a single row.
    """
    fixed = [name for name in names if name not in ROWS]
    of_rows = [name for name in names if name in ROWS]
    groups = lines.groupby(fixed, sort=False, dropna=False) if fixed else [((), lines)]
    for key, group in groups:
        values, alone = dict(zip(fixed, map(plain, key), strict=True)), group
        rows = [name for name in of_rows if group[name].nunique() > 1]
        for y in [*sorted(rows, key=lambda name: -group[name].nunique()), ""]:
            among = group if y else alone
            rest = [name for name in of_rows if name != y]
            for picked in product(*(_options(among, name) for name in rest)):
                chosen = among
                for name, value in zip(rest, picked, strict=True):
                    chosen = chosen if value == ANY else chosen[chosen[name].map(plain) == value]
                if chosen.empty or (y and chosen[y].nunique() < 2):
                    continue
                alone = alone.drop(chosen.index, errors="ignore") if y else alone
                choice = {
                    **values,
                    **dict(zip(rest, picked, strict=True)),
                    **({y: "all"} if y else {}),
                }
                yield {name: choice[name] for name in names}, y, chosen


def _options(group: pd.DataFrame, name: str) -> list[str]:
    """Return the values of a field; a block may also be ANY, since users choose it freely."""
    values = [plain(value) for value in sort_values_of(group[name])]
    return [ANY, *values] if name == "block" and len(values) > 1 else values


def _cells(lines: pd.DataFrame, x: str, y: str, gains: list[str]) -> pd.DataFrame:
    """Return a line per cell: the median one of equal blocks, and the best of all blocks.

    `gains` are the column of the gain, and further columns that split a cell.
    """
    rows = lines[y] if y else ""
    narrow = lines[[*gains[1:], "block"]].assign(x=lines[x], y=rows, gain_=lines[gains[0]])
    narrow = narrow[narrow.x.notna()].sort_values("gain_", kind="stable", na_position="first")
    place = ["x", "y", *gains[1:]]
    groups = narrow.groupby([*place, "block"], sort=False, dropna=False)
    counts, timed = groups.x.transform("size"), groups.gain_.transform("count")
    median = (counts - timed + (timed - 1) // 2).clip(upper=counts - 1)
    middle = narrow[groups.cumcount() == median]
    best = middle.groupby(place, sort=False, dropna=False).tail(1)
    cells = lines.loc[best.index].assign(x=best.x, y=best.y, count=counts.reindex(best.index))
    return cells.reset_index(drop=True)


def _best_of_formats(timed: pd.DataFrame) -> pd.DataFrame:
    """Return the best case of each sparse format in each contest."""
    timed = timed[(timed.side != "dense") & timed.gain.notna()]
    best = timed.sort_values("gain", ascending=False, kind="stable")
    best = best.drop_duplicates([*CONTEST, "kind"])
    return best[[*CONTEST, "kind", "gain", "low", "high", "decided"]]


def _cells_of_formats(chosen: pd.DataFrame, formats: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    places = [*CONTEST, *dict.fromkeys(name for name in (x, y, "block") if name)]
    return _cells(chosen[places].merge(formats, on=CONTEST), x, y, ["gain", "kind"])


def _rank(view: View) -> tuple[bool, bool, bool, bool, int]:
    """Order views: the forward product, kernel time with a cold cache, bf16, most cells."""
    choice, names = view.choice, ("op", "scope", "cache", "dtype")
    op, scope, cache, dtype = (choice.get(name, "") for name in names)
    others = op not in ("", "linear"), scope not in ("", "kernel"), cache not in ("", "cold")
    return *others, dtype not in ("", "bf16"), -len(view.cells)


def size_key(value: Any) -> tuple[float, float, str]:
    """Order numbers by size, `16x32` and `4096 × 64` by area, other text by name after them."""
    if not isinstance(value, str):
        return 0, float(value), ""
    parts = value.replace("×", "x").replace(" ", "").split("x")
    if all(part.isdigit() for part in parts):
        sizes = [float(part) for part in parts]
        return 0, float(np.prod(sizes * (2 if len(sizes) == 1 else 1))), value
    return 1, 0, value
