"""What a suite will do on a device, without doing it."""

from collections import Counter
from typing import Any

import torch

from sparsebench.harness.contest import why_not
from sparsebench.harness.measure import only
from sparsebench.harness.suite import Suite

CASE_S = {"cuda": 0.25, "cpu": 0.4}  # measured over the packaged suites, once compiled
START_S = {"cuda": 25.0, "cpu": 5.0}  # torch, CUDA, and compiling a first time


def plan(suite: Suite, device: torch.device, condition: str = "") -> dict[str, Any]:
    """Return counts, an estimate in seconds, and who is unsupported here and why."""
    contests = only(suite.contests, condition)
    reasons: Counter[tuple[str, str]] = Counter()
    supported = 0
    for contest in contests:
        for contender in contest.contenders:
            reason = why_not(contest.problem, contender, device)
            if reason:
                reasons[contender.label, reason] += 1
            else:
                supported += 1
    return {
        "suite": suite.name,
        "title": suite.title,
        "device": str(device),
        "problems": len(contests),
        "cases": sum(len(contest.contenders) for contest in contests),
        "supported": supported,
        "estimate_s": round(START_S[device.type] + supported * CASE_S[device.type]),
        "unsupported": [
            {"contender": label, "reason": reason, "cases": count}
            for (label, reason), count in sorted(reasons.items())
        ],
    }
