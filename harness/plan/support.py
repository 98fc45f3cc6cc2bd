"""Which cases a device supports, and why it does not support the others; nothing is compiled."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from sparsebench.harness.bench.operands import unusable
from sparsebench.harness.bench.prepare import unsupported_on
from sparsebench.harness.catalog import load_op
from sparsebench.harness.plan.suite import Contest


class Support(NamedTuple):
    """A contender, and the reason why a device cannot run it, "" if it can."""

    label: str
    kernel: str
    reason: str


def count_support(
    contests: Iterable[Contest], device: str, data: Path | None = None
) -> Counter[Support]:
    """Count the cases that a device supports, and those that it does not, by their reason.

    With `data`, the values of source files in that folder are read, because they can be unusable.
    """
    cases = Counter[Support]()
    for problem, contenders in ((contest.problem, contest.contenders) for contest in contests):
        of_file = unusable(problem, load_op(problem.op), data) if data else ""
        for contender in contenders:
            reason = unsupported_on(device, problem, contender) or of_file
            cases[Support(contender.label, contender.kernel, reason)] += 1
    return cases


def reasons_by_kernel(cases: Counter[Support]) -> dict[str, str]:
    """Return the most frequent reason for each kernel without a supported case."""
    supported = {each.kernel for each in cases if not each.reason}
    return {
        each.kernel: each.reason
        for each, _ in reversed(cases.most_common())
        if each.kernel not in supported
    }
