"""Preview a suite on a device: counts, run-time estimate, and unsupported cases."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from sparsebench.harness.bench.operands import unusable
from sparsebench.harness.bench.prepare import unsupported
from sparsebench.harness.bench.sampling import possible
from sparsebench.harness.catalog import load_op
from sparsebench.harness.machine.device import simulated
from sparsebench.harness.plan.selection import only, planned
from sparsebench.harness.plan.suite import Suite
from sparsebench.results.provenance import Choices, planned_choices
from sparsebench.results.record import Contender, Problem

# Measured over the packaged suites on an H200 and on two cores: seconds for the start of a process,
# for a case in each process, and for a case in a process that searches, with compilation.
START_S = {"cuda": 3.0, "cpu": 3.0, "sim": 3.0}
CASE_S = {"cuda": 0.06, "cpu": 0.4, "sim": 0.02}
SEARCH_S = {"cuda": 0.3, "cpu": 0.0, "sim": 0.0}
AGAIN_S = {"cuda": 0.1, "cpu": 0.0, "sim": 0.0}  # a search among finalists (harness/NOTES.md)


def plan(
    suite: Suite,
    device: str,
    condition: str = "",
    replicates: int = 3,
    data: Path | None = None,
) -> dict[str, Any]:
    """Return counts, an estimate in seconds, and the unsupported contenders with reasons.

    The counts are of the suite's own cases; the estimate includes the A/A pairs. The values of
    source files below `data` are read.
    """
    contests, kind = only(suite.contests, condition), device.partition(":")[0]
    running = sum(
        not _unsupported(contest.problem, contender, device)
        for contest in planned(suite, device, condition)
        for contender in contest.contenders
    )
    each_s = START_S[kind] + running * len(possible(suite.measures, device)) * CASE_S[kind]
    again = replicates - 1 if planned_choices(replicates, False) is Choices.AMONG else 0
    search_s = running * (SEARCH_S[kind] + again * AGAIN_S[kind])
    reasons: Counter[tuple[str, str]] = Counter()
    for contest in contests:
        of_file = unusable(contest.problem, load_op(contest.problem.op), data) if data else ""
        for contender in contest.contenders:
            reason = _unsupported(contest.problem, contender, device) or of_file
            if reason:
                reasons[contender.label, reason] += 1
    cases = sum(len(contest.contenders) for contest in contests)
    return {
        "suite": suite.name,
        "title": suite.title,
        "device": device,
        "problems": len(contests),
        "cases": cases,
        "supported": cases - reasons.total(),
        "replicates": replicates,
        "estimate_s": round(replicates * each_s + search_s),
        "unsupported": [
            {"contender": label, "reason": reason, "cases": count}
            for (label, reason), count in sorted(reasons.items())
        ],
    }


def uncontested(suite: Suite, device: str, condition: str = "") -> bool:
    """Return whether a device supports no contender of a suite but its baselines."""
    compared = [
        (contest.problem, contender)
        for contest in only(suite.contests, condition)
        for contender in contest.contenders
        if not contender.baseline
    ]
    return bool(compared) and all(_unsupported(*each, device) for each in compared)


def _unsupported(problem: Problem, contender: Contender, device: str) -> str | None:
    """Return why a contender cannot run on a device, or None; a simulated device runs all."""
    return None if simulated(device) else unsupported(problem, contender, torch.device(device))
