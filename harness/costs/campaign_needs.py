"""What entries of a campaign need beyond a GPU: source files, packages and checkouts.

`campaign plan --device` prints it before anything is measured. A contender that no problem of an
entry supports here would only give rows that say so.
"""

from collections.abc import Iterator
from pathlib import Path

from sparsebench.errors import SuiteError
from sparsebench.harness.bench.prepare import unsupported_on
from sparsebench.harness.claims.checking import evidence
from sparsebench.harness.claims.claim_plan import read_claims
from sparsebench.harness.plan.selection import only
from sparsebench.harness.plan.suite import Contest
from sparsebench.harness.shared_runs.campaign_file import Entry


def obstacles(entry: Entry, device: str, data: Path | None) -> list[str]:
    """Return why something of an entry cannot be measured on a device; builds nothing."""
    if entry.data and data is None:
        return [f"needs source files in --data DIR/{entry.data}"]
    reasons: dict[str, str] = {}
    supported: set[str] = set()
    try:
        contests = [*_contests(entry, data)]
    except SuiteError as error:  # the source files are missing, or cannot be read
        return [str(error)]
    for contest in contests:
        for contender in contest.contenders:
            if (kernel := contender.kernel) not in supported:
                if reason := unsupported_on(device, contest.problem, contender):
                    reasons.setdefault(kernel, reason)
                else:
                    supported.add(kernel)
    return [f"{kernel}: {reason}" for kernel, reason in reasons.items() if kernel not in supported]


def _contests(entry: Entry, data: Path | None) -> Iterator[Contest]:
    """Yield the contests of a suite or of claims; those of other entries are of an earlier one."""
    if entry.suite:
        yield from only(entry.read(data).contests, entry.only)
    elif entry.claims is not None:
        for plan in evidence(read_claims(entry.claims)).all_plans:
            yield from plan.contests
