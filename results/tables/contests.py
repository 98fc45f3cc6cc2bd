"""The gain of every case over the fastest dense contender of its contest.

    cases ─> with_gains    cases with a time, each with its gain, its side and its name
          ─> with_shapes   the same, with shape (n × k), level and the row of a grid (grid.py)

    gain     time of the fastest dense contender / time of the case, round by round and process by
             process; it equals `speedup` if the baseline is that contender
    zeros_gain  the same over the fastest dense contender on the same zeros
    half     the uncertainty of `gain`, like that of a speedup (cases.py)
    decided  the interval of `gain` is beyond the noise floor, and the verdict agrees

Dense contenders with unpruned weights come first: they are the layer that a sparse one replaces
(harness/plan/unpruned.py). Without one, `gain` is over dense on the same zeros, as in all runs up
to 0.4, and equals `zeros_gain`. A portfolio that chose a dense kernel counts as a dense contender.

Two events around an isolated call also enclose the start of its first kernel, 2 to 5 µs, which
pulls ratios of short calls towards 1. Nothing is subtracted. If such a call or its dense contender
takes less than SHORT_US, and the run also timed it inside a chain, that gain is the headline,
followed by the isolated time.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.results.ceilings import Ceilings
from sparsebench.results.formatting import FORMATS, duration
from sparsebench.results.model_shapes import OF_MODEL, model_name
from sparsebench.results.record import Status
from sparsebench.results.statistics.outcome import DIFFERENT, VERDICTS
from sparsebench.results.statistics.ratio import ratio_over
from sparsebench.results.tables.cases import CONTEST, chose_dense, dense_choice, uncertainty
from sparsebench.results.tables.families import DEFAULT, OF_MASKS, by_default, is_ours
from sparsebench.results.tables.frame import records, with_objects

# A gain is computed from these columns.
NEEDED = ["place", "label", "weights", "baseline_label", "floor", "outcome"]
NEEDED += ["speedup", "speedup_low"]
NEEDED += ["speedup_high", "interval", "blocks", "median_us", "between", "name"]
OF_GAIN = ["gain", "low", "high", "decided", "gain_interval", "dense_name", "dense_us"]
OF_ZEROS = ["zeros_gain", "zeros_low", "zeros_high"]
SHORT_US = 20.0
COLUMNS = 12  # more levels than these are rounded to whole percents
PARTS = "scores", "lists"  # with these, a call does not score the blocks itself
SELECTED = "selected "  # blocks of a call that selects them, which does more than the others
HALF = "half 2:4"  # half of each weight is 2:4 and half is dense
STORED = "kind", "tile", "block", "pattern", "label"  # what `stored_name` takes of a case


def with_gains(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases of a summary that have a time, without twins, with more columns.

    side   ours, peer or dense (`peer` are sparse ones only)
    kind   the format
    name   the kernel with its options
    tile   the block that the format stores
    place  the number of the contest
    gain   over the fastest dense contender, with low, high, half, decided and `gain_interval`,
           the text of `interval` (cases.py) for the gain; `dense_name` and `dense_us` name and
           time that contender
    over   the weights that it multiplies: original, pruned, or "" if no dense contender has a time
    zeros_gain  over the fastest one with pruned weights, with zeros_low and zeros_high
    """
    timed = cases[(cases.status == Status.OK) & ~cases.twin.astype(bool)].copy()
    timed = timed[timed.median_us.notna()]
    if timed.empty:
        return timed
    kind = timed["format"].astype(str)
    dense, ours = (kind == "dense") | chose_dense(timed), timed.kernel.map(is_ours).astype(bool)
    side = np.select([dense, ours], ["dense", "ours"], "peer")
    place = pd.factorize(pd.MultiIndex.from_frame(timed[CONTEST]))[0]
    timed = timed.assign(side=side, kind=kind, name=_names(timed), tile=_tiles(timed), place=place)
    return with_objects(_with_gains(timed))


def usual(timed: pd.DataFrame) -> pd.DataFrame:
    """Return the cases of the measure to show first: isolated and cold if the run has it."""
    scope = next((name for name in ("kernel", "op") if (timed.scope == name).any()), None)
    isolated = timed if scope is None else timed[timed.scope == scope]
    cold = isolated[isolated.cache == "cold"]
    return isolated if cold.empty else cold


def in_chain(case: Mapping[Any, Any], timed: pd.DataFrame) -> Mapping[Any, Any]:
    """Return the row of a short case inside a chain, or any other case unchanged."""
    if not is_short(case):
        return case
    chained = timed[timed.case_id.eq(case["case_id"]) & timed.scope.eq("chain")]
    chained = chained[chained.cache == case["cache"]]
    return dict(chained.iloc[0]) if len(chained) else case


def is_short(case: Mapping[Any, Any]) -> bool:
    """Return whether a case or its baseline takes less than SHORT_US as an isolated call."""
    shorter_us = case["median_us"] * min(1.0, case["speedup"] if case["speedup"] > 0 else 1.0)
    return bool(case["scope"] == "kernel" and shorter_us < SHORT_US)


def is_replaced(timed: pd.DataFrame) -> "pd.Series[bool]":
    """Return which dense contenders are no rivals: beside them is one with unpruned weights."""
    return (timed.side == "dense") & (timed.over == "original") & (timed.weights == "pruned")


def multiplies_zeros(timed: pd.DataFrame) -> "pd.Series[bool]":
    """Return for which lines a dense contender with pruned weights multiplies their zeros.

    It computes what a mask leaves out, and all of a weight's gradient.
    """
    return (timed.level > 0) & ~timed.kind.isin(OF_MASKS) & ~timed.op.str.endswith("_wgrad")


def empty_launch(environment: Mapping[str, Any], cases: pd.DataFrame) -> list[str]:
    """Report the time of an empty launch if a run timed short isolated calls on a GPU."""
    isolated = (cases.scope == "kernel") & (cases.clock != "host") & (cases.median_us < SHORT_US)
    if not (isolated.any() and environment.get("ceilings")):
        return []
    floor = duration(Ceilings.from_json(environment["ceilings"]).launch_us)
    sentence = f"An empty launch takes {floor}, the floor of every isolated call"
    return [f"{sentence}. Nothing is subtracted from times."]


def with_shapes(timed: pd.DataFrame) -> pd.DataFrame:
    """Add `shape` (n × k, or the name of a model), `row`, the title in a grid, and `of_units`.

    If weights have one sparsity, level is the share of units off.
    """
    level, of_units = timed.level, _of_units(timed)
    if of_units.any():
        units = timed.n.astype("float64")
        if "intermediate" in timed:  # a decoding step
            units = units.fillna(timed.intermediate.astype("float64"))
        level = level.mask(of_units, 1 - timed.active / units)
    digits = 2 if level.round(3).nunique() > COLUMNS else 4
    sizes = zip(timed.n, timed.k, strict=True)
    shape = ["" if pd.isna(n) or pd.isna(k) else f"{n} × {k}" for n, k in sizes]
    if {*OF_MODEL} <= {*timed}:
        models = timed[OF_MODEL].to_numpy(dtype=float, na_value=np.nan).tolist()
        shape = [
            text if np.isnan(model[0]) else model_name(*map(int, model))
            for text, model in zip(shape, models, strict=True)
        ]
    row = [
        SELECTED * selects(choice) + stored_name(*map(str, names))
        for choice, *names in timed[["choice", *STORED]].to_numpy()
    ]
    lines = timed.assign(shape=shape, level=level.round(digits), of_units=of_units, row=row)
    return with_objects(lines)


def method_of(choice: str) -> str:
    """Return how a call with this choice selects its blocks; "" if it is given them."""
    return str(json.loads(choice or "{}").get("selects", ""))


def selects(choice: str) -> bool:
    """Return whether a call scores and selects its blocks itself; another one is given them."""
    return method_of(choice) not in {"", *PARTS}


def stored_name(kind: str, tile: str, block: str, pattern: str, label: str) -> str:
    """Name what a contender stores: blocks of 64, 2:4, half 2:4, CSR."""
    if tile not in ("", "1"):
        return f"blocks of {tile}" if tile == block else f"zeros anywhere in blocks of {tile}"
    is_half = pattern.startswith("spense_") or " dense_fraction=0.5" in label
    return HALF if is_half else FORMATS.get(kind, kind)


def sort_values_of(values: "pd.Series[Any]") -> list[Any]:
    """Return the distinct values: numbers and sizes by size, other text by name."""
    return sorted(values.dropna().unique(), key=size_key)


def _names(cases: pd.DataFrame) -> pd.Series:
    """Return kernels with their options; for a portfolio, the dense kernel that it chose.

    A contender without a kernel runs the kernel that a layer would choose, and has its name.
    """
    names = cases.label.str.partition("/")[2].str.replace(r" block=\S+", "", regex=True)
    names = names.where(~chose_dense(cases), cases.chosen.map(dense_choice))
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
    return blocks.where(cases.format.isin({"bsr", *OF_MASKS}), "")


def _with_gains(cases: pd.DataFrame) -> pd.DataFrame:
    """Add the gain of each case over the fastest dense case of its contest, and that case."""
    dense = cases[cases.side == "dense"]
    dense = dense.assign(rank=dense.speedup.fillna(0), rate=-dense.median_us)
    dense = dense.sort_values(["rank", "rate"], ascending=False, kind="stable")[NEEDED]
    fastest = {(line["place"], line["weights"]): line for line in reversed(records(dense))}
    lines = []
    for line in records(cases[NEEDED]):
        same_zeros = fastest.get((line["place"], "pruned"))
        base = fastest.get((line["place"], "original"), same_zeros)
        named = (base["name"], base["median_us"], base["weights"]) if base else ("", np.nan, "")
        lines.append((*_gain(line, base), *named, *_gain(line, same_zeros)[:3]))
    table = pd.DataFrame(lines, cases.index, [*OF_GAIN, "over", *OF_ZEROS])
    half = uncertainty(table.gain, table.low, table.high, cases.floor, cases.processes)
    half = half.mask((table.low == 1) & (table.high == 1), 0.0)  # the fastest dense case itself
    return cases.assign(**{str(name): column for name, column in table.items()}, half=half)


def _gain(
    line: dict[Any, Any], base: dict[Any, Any] | None
) -> tuple[float, float, float, bool, str]:
    """Return the first five of OF_GAIN for a case and the fastest dense one of its contest."""
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


def size_key(value: Any) -> tuple[float, float, str]:
    """Order numbers by size, `16x32` and `4096 × 64` by area, other text by name after them."""
    if not isinstance(value, str):
        return 0, float(value), ""
    parts = value.replace("×", "x").replace(" ", "").split("x")
    if all(part.isdigit() for part in parts):
        sizes = [float(part) for part in parts]
        return 0, float(np.prod(sizes * (2 if len(sizes) == 1 else 1))), value
    return 1, 0, value
