"""Which kernels run on a device, and why the others do not; nothing is compiled.

A kernel runs here if it supports at least one of its problems in the packaged suites.
"""

from collections import Counter
from dataclasses import dataclass

import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.bench.prepare import unsupported
from sparsebench.harness.catalog import suites
from sparsebench.harness.plan.suite import read


@dataclass(frozen=True)
class Probed:
    """A kernel: its cases, those supported here, and the most frequent reason for the others."""

    kernel: str
    cases: int
    supported: int
    reason: str


def probe(device: torch.device) -> list[Probed]:
    """Check every kernel of the packaged suites that need no files."""
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
                reason = unsupported(contest.problem, contender, device)
                cases[kernel] += 1
                supported[kernel] += not reason
                reasons.setdefault(kernel, Counter()).update([reason] if reason else [])
    return [
        Probed(kernel, cases[kernel], supported[kernel], _most(reasons[kernel]))
        for kernel in sorted(cases)
    ]


def _most(reasons: Counter[str]) -> str:
    return reasons.most_common(1)[0][0] if reasons else ""
