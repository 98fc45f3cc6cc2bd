"""The order of a survey's problems, and the cases of each that several processes measure again.

    order   of each shape the problem at DECIDED sparsity first, then from its least sparse one on;
            so a survey that is cut short has looked at every shape
    cases   the winner of the screening, and the runner-up if another kernel ran there: `default`
            and the kernel that it chose are one; the baseline is in every contest anyway

One process chooses; another run measures the chosen cases again, so that a lucky result of the
first is in no number.
"""

import json
from collections.abc import Iterable
from math import inf
from typing import Any

import pandas as pd

from sparsebench.harness.costs.measured_times import product
from sparsebench.results.record import Problem, Status

DECIDED = 0.9  # the sparsity that block-sparse papers and this project's headlines are about


def deciding(cases: pd.DataFrame, problems: Iterable[Problem]) -> dict[str, list[str]]:
    """Return the ids of problems with a time, in order, with the cases to measure again."""
    raced = cases[(cases.status == Status.OK) & ~cases.twin.astype(bool)]
    raced = raced.sort_values("median_us").groupby("problem_id").head(2)
    choices = map(json.loads, raced.choice)
    ran = [choice.get("kernel", named) for choice, named in zip(choices, raced.kernel, strict=True)]
    raced = raced.assign(ran=ran).drop_duplicates(["problem_id", "ran"])
    ids = raced.groupby("problem_id").case_id.apply(list)
    ranks = coarse(problems)
    return {problem: ids[problem] for problem in sorted(ids.index, key=lambda p: ranks.get(p, inf))}


def coarse(problems: Iterable[Problem]) -> dict[str, int]:
    """Rank problems by id. Ranks add up over blocks in the order of the suite."""
    shapes: dict[tuple[Any, ...], list[Problem]] = {}
    for problem in problems:
        shapes.setdefault((*product(problem), problem["pattern"]), []).append(problem)
    ranks = {}
    for shape in shapes.values():
        levels = sorted({_level(problem) for problem in shape})
        nearest = min(levels, key=lambda level: abs(level - DECIDED))
        levels = list(dict.fromkeys([nearest, *levels]))
        blocks = list(dict.fromkeys(str(problem["block"]) for problem in shape))
        for problem in shape:
            ranks[problem.id] = levels.index(_level(problem)) + blocks.index(str(problem["block"]))
    return ranks


def _level(problem: Problem) -> float:
    """Return the sparsity, or of units the fraction that is off."""
    active: Any = problem.fields.get("active")
    return float(problem["sparsity"]) if active is None else 1 - float(active) / problem["n"]
