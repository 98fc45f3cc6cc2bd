"""The order of the screening, and the problems of it that decide.

    winners       the problem at DECIDED sparsity of each op and shape, or the sparsest
    break-evens   for each contender that crosses the baseline, the two levels around the crossing
    close races   where winner and runner-up are nearest to each other

One process chooses; another run measures the chosen problems again, so that a lucky result of the
first is in no number.
"""

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import pandas as pd

from sparsebench.harness.costs.measured_times import product
from sparsebench.results.analysis import break_even, winners
from sparsebench.results.frame import fields
from sparsebench.results.record import Problem, Status

DECIDED = 0.9  # the sparsity that block-sparse papers and this project's headlines are about


def deciding(cases: pd.DataFrame) -> dict[str, list[str]]:
    """Return the ids of problems, most decisive first, with the cases to measure again.

    These are the winner and the runner-up, or the contender that breaks even; the baseline is
    in every contest anyway.
    """
    raced = cases[(cases.status == Status.OK) & ~cases.twin.astype(bool)]
    chosen: dict[str, dict[str, None]] = {}
    for problem, case in (*_best(raced), *_around(raced), *_close(raced)):
        chosen.setdefault(problem, {})[case] = None
    return {problem: list(ids) for problem, ids in chosen.items()}


def _best(raced: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield winner and runner-up of one problem for each shape."""
    for _, shape in raced.groupby(_shape(raced), sort=False, dropna=False):
        levels = shape.level.dropna().unique()
        nearest = min(levels, key=lambda level: (abs(level - DECIDED), level)) if len(levels) else 0
        at = shape[shape.level.isna() | (shape.level == nearest)]
        best: Any = at.speedup.fillna(1.0).idxmax()
        yield from _first_two(raced, str(at.problem_id[best]))


def _around(raced: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield the cases at both levels around a break-even."""
    crossing = break_even(raced).dropna(subset="break_even")
    keys = [str(name) for name in crossing if name in raced and name != "baseline_label"]
    for line in crossing.to_dict("records"):
        alike = raced[[_same(row, line, keys) for row in raced.to_dict("records")]]
        levels = alike.sort_values("level")
        below = levels[levels.level <= line["break_even"]].tail(1)
        above = levels[levels.level > line["break_even"]].head(1)
        yield from pd.concat([below, above])[["problem_id", "case_id"]].itertuples(index=False)


def _close(raced: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield winner and runner-up of every problem, the closest races first."""
    for problem in winners(raced).sort_values("lead").problem_id:
        yield from _first_two(raced, str(problem))


def _first_two(raced: pd.DataFrame, problem: str) -> Iterator[tuple[str, str]]:
    best = raced[raced.problem_id == problem].nsmallest(2, "median_us")
    yield from ((problem, case) for case in best.case_id)


def _shape(raced: pd.DataFrame) -> list[str]:
    return ["op", *(name for name in fields(raced) if name not in ("sparsity", "block"))]


def _same(row: dict[Hashable, object], line: dict[Hashable, object], keys: list[str]) -> bool:
    pairs: list[tuple[Any, Any]] = [(row[key], line[key]) for key in keys]
    return all(a == b or bool(pd.isna(a) and pd.isna(b)) for a, b in pairs)


def coarse(problems: Iterable[Problem], decided: float) -> dict[str, int]:
    """Rank problems by id: of each shape the level `decided` first, then its least sparse one.

    Ranks add up over blocks in the order of the suite, so that a screening that is cut short has
    looked at every shape.
    """
    shapes: dict[tuple[Any, ...], list[Problem]] = {}
    for problem in problems:
        shapes.setdefault((*product(problem), problem["pattern"]), []).append(problem)
    ranks = {}
    for shape in shapes.values():
        levels = sorted({_level(problem) for problem in shape})
        nearest = min(levels, key=lambda level: abs(level - decided))
        levels = list(dict.fromkeys([nearest, *levels]))
        blocks = list(dict.fromkeys(str(problem["block"]) for problem in shape))
        for problem in shape:
            ranks[problem.id] = levels.index(_level(problem)) + blocks.index(str(problem["block"]))
    return ranks


def _level(problem: Problem) -> float:
    """Return the sparsity, or of units the fraction that is off."""
    active: Any = problem.fields.get("active")
    return float(problem["sparsity"]) if active is None else 1 - float(active) / problem["n"]
