"""Who wins each contest: the best of ours, the best sparse peer and the best dense contender.

    cases ─> raced     cases with a time; each is against the fastest dense one of its contest
          ─> contests  a line a contest, with columns best_*, ours_*, peer_* and dense_*

    gain      time of the fastest dense contender / time of the case, block by block and process by
              process (pairing.py). It is `speedup` where the baseline is that contender
    half      how far `gain` may be off, as `uncertainty` of a speed-up (verdict.py)
    settled   the interval of `gain` is beyond the noise floor, and the verdict says so too

A portfolio that chose a dense kernel is a dense contender. Sparse activations have dense weights:
their kernels are sparse by their family.
"""

from typing import Any

import numpy as np
import pandas as pd

from sparsebench.results.families import OURS, family
from sparsebench.results.frame import fields
from sparsebench.results.pairing import between
from sparsebench.results.record import Status
from sparsebench.results.statistics import Outcome
from sparsebench.results.summary import CONTEST, chose_dense
from sparsebench.results.verdict import uncertainty

SIDES = ("best", "ours", "peer", "dense")
SAID = ["ran", "name", "label", "kernel", "kind", "tile", "gain", "low", "high", "half"]
SAID += ["settled", "median_us", "outcome", "case_id"]
DECIDED = (Outcome.FASTER, Outcome.SLOWER)


def raced(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases of a summary that have a time, without twins, with more columns.

    Dense contenders are peers too; here `peer` are the sparse ones.

    side   ours, peer or dense              gain   over the fastest dense one, with low, high, half
    kind   the format, or `activations`     tile   the block that the format stores
    name   of the kernel with its options   settled
    """
    found = cases[(cases.status == Status.OK) & ~cases.twin.astype(bool)].copy()
    found = found[found.median_us.notna()]
    if found.empty:
        return found
    kind = kinds(found)
    dense, own = (kind == "dense") | chose_dense(found), found.kernel.map(family).isin(OURS)
    found = found.assign(
        side=np.select([dense, own], ["dense", "ours"], "peer"),
        kind=kind,
        name=_names(found),
        tile=_tiles(found),
    )
    return _against_dense(found)


def kinds(cases: pd.DataFrame) -> pd.Series:
    """Return the formats of cases; `activations` where weights are dense and activations sparse."""
    active = (cases.kernel.map(family) == "twell") & (cases["format"] == "dense")
    return cases["format"].astype(str).mask(active, "activations")


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
    elif found := between(line["blocks"], base["blocks"]):
        gain, low, high = found.value, found.low, found.high
    else:  # they were timed in different processes
        gain, low, high = base["median_us"] / line["median_us"], np.nan, np.nan
    return gain, low, high, bool(low > 1 + floor or high < 1 / (1 + floor))
