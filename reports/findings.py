"""The sentences above the table of an answer: break-evens, then winners by op, pattern and dtype.

bsr_small 10.3 µs, 3.17× cublas [3.15, 3.19], 26 % of the hardware limit
  1.12× [1.10, 1.14] as fast as torch_bsr tuned=True; users get it by default (10.4 µs); linear,
  m = 64, 90 %
  one card, limited by power or heat for 12 % of the time

What users get (`default`) is no rival of the kernel that it runs: a winner that was also measured
by its name has that name and that time.
"""

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from sparsebench.results.answer import TOPIC, first_views, general_sentences, other_dtypes
from sparsebench.results.formatting import (
    between,
    blocks_text,
    conditions,
    duration,
    percent,
    times,
)
from sparsebench.results.model_shapes import model_name
from sparsebench.results.statistics.ratio import ratio_over
from sparsebench.results.tables import cliffs, default_kernels, untimed_peers
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.cases import CONTEST
from sparsebench.results.tables.contests import OF_MODEL, in_chain, usual
from sparsebench.results.tables.families import DEFAULT
from sparsebench.results.tables.frame import records

LEVEL = 0.9  # formats are compared at the measured sparsity nearest to this
MOST = 4  # ops and patterns with winners
LEAST = 0.01  # relative uncertainty that a lead shows


def findings(analysis: Analysis) -> list[str]:
    """Return break-evens, and the winner of each op, pattern and dtype near LEVEL, in lines."""
    general = [line for view in first_views(analysis.views) for line in general_sentences(view)]
    timed = analysis.timed
    if timed.empty:
        return general
    first = usual(timed)
    general = [*filter(None, [cliffs.sentence(first)]), *general]
    sparse = first[first.side != "dense"]
    topics = [group for _, group in sparse.groupby([*TOPIC], sort=False)]
    best = [case for group in topics[:MOST] for case in _best_of_dtypes(group)]
    with_dtype = len({case["dtype"] for case in best}) > 1
    winners = [line for case in best for line in _winner(case, timed, with_dtype)]
    closing = [default_kernels.sentence(first), untimed_peers.sentence(analysis.run.rows)]
    return [*general, *winners, *filter(None, closing)]


def remarks(analysis: Analysis) -> list[str]:
    """Return what follows a run's headline.

    These are other dtypes, cliffs, slower kernels by default and missing kernels of others.
    """
    cases = usual(analysis.timed)
    closing = [default_kernels.sentence(cases), untimed_peers.sentence(analysis.run.rows)]
    sentences = filter(None, [cliffs.sentence(cases), *closing])
    return [*other_dtypes(analysis.views), *sentences]


def _winner(best: Mapping[Any, Any], timed: pd.DataFrame, with_dtype: bool) -> list[str]:
    """Write a winner with its interval, its share of the hardware limit, and its lead."""
    best = _by_name(best, timed)
    isolated, best = best, in_chain(best, timed)
    contest = timed[(timed[CONTEST] == pd.Series(best)[CONTEST]).all(axis=1)]
    dense, rivals = _fastest_dense(contest), contest[contest.side != "dense"]
    inside = " inside a chain" if best is not isolated else ""
    words = [f"{contender_name(best)} {duration(best['median_us'])}{inside}"]
    if pd.notna(best["gain"]) and dense is not None:
        low, high, half = (best[name] for name in ("low", "high", "half"))
        ends = between(best["gain"], low, high, half)
        words.append(ends.replace("×", f"× {dense['name']}", 1))
    if inside:
        gain = times(isolated["gain"], isolated["half"])
        words.append(f"isolated {duration(isolated['median_us'])}, {gain}")
    if best["of_bound"] > 0:
        words.append(f"{percent(round(best['of_bound'], 2))} of the hardware limit")
    place, lead = _place(best, with_dtype), "no other sparse kernel has a time"
    rest = rivals[rivals.label != best["label"]].sort_values("median_us")
    by_default = (rest.kernel == DEFAULT) & _runs_as(best, rest)
    same, rest = rest[by_default], rest[~by_default]
    users = rest[rest.kernel == DEFAULT]
    if len(rest):
        following = dict(rest.iloc[0])
        lead = f"{_lead(best, following)} as fast as {contender_name(following)}"
    if len(same):
        lead += f"; users get it by default ({duration(same.iloc[0]['median_us'])})"
    elif len(users) and users.index[0] != rest.index[0]:
        default = users.iloc[0]
        lead += f"; users get {contender_name(dict(default))}, {duration(default['median_us'])}"
    where = conditions(best["on_cards"], best["limited"])
    return [", ".join(words), f"  {lead}; {place}", *([f"  {where}"] if where else [])]


def _lead(best: Mapping[Any, Any], following: Mapping[Any, Any]) -> str:
    """Write how many times as fast a case is; with an interval if both ran in one process."""
    if lead := ratio_over(best["blocks"], following["blocks"], best["between"]):
        half = max(LEAST * lead.value, lead.high - lead.value, lead.value - lead.low)
        return between(lead.value, lead.low, lead.high, half)
    ratio = following["median_us"] / best["median_us"]
    return times(ratio, LEAST * ratio)


def _by_name(best: Mapping[Any, Any], timed: pd.DataFrame) -> Mapping[Any, Any]:
    """Return the case of the kernel that `default` ran, if that was measured too; else `best`."""
    contest = timed[(timed[CONTEST] == pd.Series(best)[CONTEST]).all(axis=1)]
    named = contest[(contest.side == "ours") & (contest.kernel != DEFAULT)]
    named = named[_runs_as(best, named)].sort_values("median_us")
    return dict(named.iloc[0]) if best["kernel"] == DEFAULT and len(named) else best


def _runs_as(case: Mapping[Any, Any], others: pd.DataFrame) -> "pd.Series[bool]":
    """Return which others run the kernel of a case on the same blocks; none if it ran several."""
    alike = [
        bool(kernel_that_ran(case))
        and (kernel_that_ran(other), other["tile"]) == (kernel_that_ran(case), case["tile"])
        for other in records(others)
    ]
    return pd.Series(alike, others.index, dtype=bool)


def kernel_that_ran(case: Mapping[Any, Any]) -> str:
    """Return the kernel that a case runs: of `default` the chosen one, "" for a whole layer.

    A layer's gradient names the kernel of its product: bsr_small for bsr_small_dgrad.
    """
    chosen = json.loads(case["choice"] or "{}").get("kernel", "")
    return str(chosen if case["kernel"] == DEFAULT else case["kernel"]).removesuffix("_dgrad")


def contender_name(case: Mapping[Any, Any]) -> str:
    """Name a case as every sentence does; a dense kernel that a portfolio chose, with it."""
    by = f" (by {case['kernel']})" if str(case["chosen"]).startswith("dense, ") else ""
    return f"{case['name']}{by}"


def _best_of_dtypes(group: pd.DataFrame) -> list[dict[Any, Any]]:
    """Return the winner of each dtype; only those with a dense time, if there are any."""
    best = [_nearest(cases) for _, cases in group.groupby("dtype", sort=False)]
    return [case for case in best if pd.notna(case["gain"])] or best


def _nearest(group: pd.DataFrame) -> dict[Any, Any]:
    """Return the fastest case at the sparsity nearest to LEVEL."""
    away = (group.level - LEVEL).abs().fillna(1).round(3)  # levels of files differ
    near = group[away == away.min()].assign(haste=-group.median_us)
    return dict(near.sort_values(["gain", "haste"], na_position="first").iloc[-1])


def _fastest_dense(contest: pd.DataFrame) -> dict[Any, Any] | None:
    """Return the fastest dense case of a contest; None without one."""
    dense = contest[(contest.side == "dense") & (contest.gain == 1)]
    return dict(dense.sort_values("median_us").iloc[0]) if len(dense) else None


def _place(case: Mapping[Any, Any], with_dtype: bool) -> str:
    """Name a problem: `linear, m = 64, 90 %, 128 × 128 blocks`, `... 29 of 5632 units active`."""
    block = str(case.get("block", ""))
    sizes = [case[name] for name in OF_MODEL if name in case and pd.notna(case[name])]
    parts = [str(case["op"]), *([str(case["dtype"])] if with_dtype else []), f"m = {case['m']}"]
    parts += [model_name(*map(int, sizes))] if sizes else []
    parts += [percent(case["level"])] if case["level"] > 0 else []
    parts += [blocks_text(block)] if block not in ("", "1", "nan") else []
    if pd.notna(case.get("active")):
        units = case["intermediate"] if pd.isna(case["n"]) else case["n"]  # decoding
        parts.append(f"{case['active']:g} of {units} units active")
    if pd.notna(case.get("source")):
        parts.append(str(case["source"]))
    return ", ".join(parts)
