"""What a survey measures: the kernels that run on a device, and its problems in order.

    probe   which kernels run, and why the others do not; nothing is compiled. A kernel runs here if
            it supports at least one of its problems in the packaged suites
    order   of each shape the problem at DECIDED sparsity first, then from its least sparse one on;
            so a survey that is cut short has looked at every shape
    cases   the fastest one of the screening but the baseline, which is in every contest anyway

One process chooses; another run measures the chosen cases again, so that a lucky result of the
first is in no number.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import pandas as pd

from sparsebench.errors import SuiteError
from sparsebench.harness.catalog import suites
from sparsebench.harness.plan.suite import Contest, read
from sparsebench.harness.plan.support import count_support
from sparsebench.results.record import Problem, Status

SHAPE = "m", "n", "k", "dtype", "pattern"
DECIDED = 0.9  # the sparsity that block-sparse papers and this project's headlines are about


@dataclass(frozen=True)
class Probed:
    """A kernel: its cases, those supported here, and the most frequent reason for the others."""

    kernel: str
    cases: int
    supported: int
    reason: str


def probe(device: str) -> list[Probed]:
    """Check every kernel of the packaged suites that need no files."""
    contests: list[Contest] = []
    for name in sorted(suites()):
        with suppress(SuiteError):  # its operands come from files below --data
            contests += read(name).contests
    by_kernel: dict[str, Counter[str]] = {}
    for (_, kernel, reason), count in count_support(contests, device).items():
        by_kernel.setdefault(kernel, Counter())[reason] += count
    probes = []
    for kernel, reasons in sorted(by_kernel.items()):
        total, supported = reasons.total(), reasons.pop("", 0)
        ((reason, _),) = reasons.most_common(1) or [("", 0)]
        probes.append(Probed(kernel, total, supported, reason))
    return probes


def deciding(cases: pd.DataFrame, problems: Iterable[Problem]) -> dict[str, str]:
    """Return the ids of problems with a time, in order, with the case to measure again."""
    others = ~cases.twin.astype(bool) & ~cases.baseline.astype(bool)
    fastest = cases[(cases.status == Status.OK) & others]
    fastest = fastest.sort_values("median_us").drop_duplicates("problem_id")
    ids = dict(zip(fastest.problem_id, fastest.case_id, strict=True))
    ranks = coarse(problems)
    return {problem: ids[problem] for problem in sorted(ids, key=lambda p: ranks.get(p, inf))}


def coarse(problems: Iterable[Problem]) -> dict[str, int]:
    """Rank problems by id. Ranks add up over blocks in the order of the suite."""
    shapes: dict[tuple[Any, ...], list[Problem]] = {}
    for problem in problems:
        sizes = (problem.fields.get(name) for name in SHAPE)
        shapes.setdefault((problem.op, *sizes), []).append(problem)
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
