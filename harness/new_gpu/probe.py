"""Which kernels run on a device, and why the others do not; nothing is compiled.

A kernel runs here if it supports at least one of its problems in the packaged suites.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.bench import prepare
from sparsebench.harness.catalog import suites
from sparsebench.harness.machine.device import simulated
from sparsebench.harness.plan.suite import read
from sparsebench.harness.sim import gpu_model, simulated_contest
from sparsebench.results.record import Contender, Problem

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
    if simulated(device):
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
