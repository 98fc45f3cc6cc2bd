"""Which kernels run on a device, and why the others do not; nothing is built.

A kernel is asked about every problem that a packaged suite gives it, as a run would ask. It runs
here if it supports one of them.
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
    """A kernel: how many cases it has, how many it supports here, why not most of the others."""

    kernel: str
    cases: int
    supported: int
    reason: str


def probe(device: torch.device) -> list[Probed]:
    """Ask every kernel of the packaged suites that need no files, by name."""
    asked, supported = Counter[str](), Counter[str]()
    reasons: dict[str, Counter[str]] = {}
    for name in sorted(suites()):
        try:
            contests = read(name).contests
        except SuiteError:  # it takes its operands from files: --data
            continue
        for contest in contests:
            for contender in contest.contenders:
                kernel = contender.kernel
                reason = unsupported(contest.problem, contender, device)
                asked[kernel] += 1
                supported[kernel] += not reason
                reasons.setdefault(kernel, Counter()).update([reason] if reason else [])
    return [
        Probed(kernel, asked[kernel], supported[kernel], _most(reasons[kernel]))
        for kernel in sorted(asked)
    ]


def _most(reasons: Counter[str]) -> str:
    return reasons.most_common(1)[0][0] if reasons else ""
