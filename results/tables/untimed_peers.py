"""Kernels of others that a run could not measure, because of the machine and not of the problem.

A package is missing, say; ours may then be the fastest only because they did not take part. A
kernel that refuses a problem says what it expected (kernels/_common/requirements.py), and one for
another kind of device says on which it runs. Every other reason is one of the machine.
"""

from collections.abc import Iterable

from sparsebench.results.formatting import join_words
from sparsebench.results.record import Row, Status
from sparsebench.results.tables.families import is_ours

OF_PROBLEM = "expected "
OF_DEVICE = "runs on "


def sentence(rows: Iterable[Row]) -> str:
    """Name the kernels of others that have no time in any case; "" if there are none."""
    timed, untimed = set[str](), set[str]()
    for row in rows:
        kernel, detail = row.case.contender.kernel, row.detail or ""
        if row.status is Status.OK:
            timed.add(kernel)
        elif row.status is Status.FAILED or (
            row.status is Status.UNSUPPORTED
            and OF_PROBLEM not in detail
            and not detail.startswith(OF_DEVICE)
        ):
            untimed.add(kernel)
    names = sorted(name for name in untimed - timed if not is_ours(name))
    return f"Not compared, because they could not run here: {join_words(names)}." if names else ""
