"""Which cases a device supports, and why it does not support the others; nothing is compiled."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from sparsebench.harness.bench.prepare import unsupported_on
from sparsebench.harness.plan.suite import Contest


class Support(NamedTuple):
    """A contender, and the reason why a device cannot run it, "" if it can."""

    label: str
    kernel: str
    reason: str


def count_support(contests: Iterable[Contest], device: str) -> Counter[Support]:
    """Count the cases that a device supports, and those that it does not, by their reason."""
    cases = Counter[Support]()
    for problem, contenders in ((contest.problem, contest.contenders) for contest in contests):
        for contender in contenders:
            reason = unsupported_on(device, problem, contender) or ""
            cases[Support(contender.label, contender.kernel, reason)] += 1
    return cases
