"""What a survey measures: the kernels that run on a device, and its problems in order.

    probe   which kernels run, and why the others do not; nothing is compiled. A kernel runs here if
            it supports at least one of its problems in the packaged suites
    order   of each shape the problem at DECIDED sparsity first, then from its least sparse one on;
            so a survey that is cut short has looked at every shape
    cases   the winner of the screening, and the runner-up if another kernel ran there: `default`
            and the kernel that it chose are one; the baseline is in every contest anyway

One process chooses; another run measures the chosen cases again, so that a lucky result of the
first is in no number.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import pandas as pd
import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.bench import prepare
from sparsebench.harness.catalog import suites
from sparsebench.harness.costs.measured_times import product
from sparsebench.harness.machine.device import is_simulated
from sparsebench.harness.plan.suite import read
from sparsebench.harness.sim import gpu_model, simulated_contest
from sparsebench.results.record import Contender, Problem, Status

DECIDED = 0.9  # the sparsity that block-sparse papers and this project's headlines are about

Unsupported = Callable[[Problem, Contender], str | None]


@dataclass(frozen=True)
class Probed:
    """A kernel: its cases, those supported here, and the most frequent reason for the others."""

    kernel: str
    cases: int
    supported: int
    reason: str


def probe(device: str) -> list[Probed]:
    """Check every kernel of the packaged suites that need no files."""
    if is_simulated(device):
        unsupported: Unsupported = partial(simulated_contest.unsupported, gpu_model.read(device))
    else:
        unsupported = partial(prepare.unsupported, device=torch.device(device))
    cases, supported = Counter[str](), Counter[str]()
    reasons: dict[str, Counter[str]] = {}
    for name in sorted(suites()):
        try:
            contests = read(name).contests
        except SuiteError:  # its operands come from files below --data
            continue
        for contest in contests:
            for contender in contest.contenders:
                kernel = contender.kernel
                reason = unsupported(contest.problem, contender)
                cases[kernel] += 1
                supported[kernel] += not reason
                reasons.setdefault(kernel, Counter()).update([reason] if reason else [])
    most = {kernel: why.most_common(1)[0][0] if why else "" for kernel, why in reasons.items()}
    return [Probed(name, cases[name], supported[name], most[name]) for name in sorted(cases)]


def deciding(cases: pd.DataFrame, problems: Iterable[Problem]) -> dict[str, list[str]]:
    """Return the ids of problems with a time, in order, with the cases to measure again."""
    fastest = cases[(cases.status == Status.OK) & ~cases.twin.astype(bool)]
    fastest = fastest.sort_values("median_us").groupby("problem_id").head(2)
    choices = zip(map(json.loads, fastest.choice), fastest.kernel, strict=True)
    ran = [choice.get("kernel", name) for choice, name in choices]
    fastest = fastest.assign(ran=ran).drop_duplicates(["problem_id", "ran"])
    ids = fastest.groupby("problem_id").case_id.apply(list)
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
