"""A kernel from outside the package beside all its rivals: a table per op, pattern and dtype.

    acme.ell beside its rivals: linear, bf16, m 64, 4096 × 4096, 90 %
    contender   time     over dense
    bsr_small   8.1 µs   3.1× [3.0, 3.2]
    acme.ell    11.3 µs  2.2× [2.1, 2.3]
    cublas      25.1 µs  –

The grids show only the fastest kernel of each format, so an author's kernel that is not the fastest
would be in none of them. The contest is the one in which it gains most near the usual sparsity. A
run records the packages whose kernels it ran, so a page is the same where they are not installed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from sparsebench._discovery import package_names
from sparsebench.reports.findings import TOPIC, fastest, finding_of
from sparsebench.reports.tables import Cell, Table
from sparsebench.results.formatting import NONE, between, duration
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.contests import usual
from sparsebench.results.tables.families import DEFAULT
from sparsebench.results.tables.frame import records

REFERENCE = "reference"  # the op's torch implementation, which has no file in kernels
COLUMNS = "contender", "time", "over dense"


def rivals(analysis: Analysis) -> Iterator[Table]:
    """Yield a table for each op, pattern and dtype in which a kernel from outside has a time."""
    timed = analysis.timed
    if timed.empty or not analysis.run.environment.get("plugins"):
        return
    first = usual(timed)
    guests = {*first.kernel} - package_names("kernels") - {DEFAULT, REFERENCE}
    for _, cases in first[first.kernel.isin(guests)].groupby([*TOPIC, "dtype"], sort=False):
        best = fastest(cases, timed)
        contest = first[first.place == best["place"]].sort_values("median_us")
        names = ", ".join(dict.fromkeys(contest.name[contest.kernel.isin(guests)]))
        yield Table(
            title=f"{names} beside its rivals: {finding_of(best, timed).group}",
            columns=COLUMNS,
            lines=[_line(case, case["kernel"] in guests) for case in records(contest)],
            words=["contender"],
        )


def _line(case: Mapping[Any, Any], guest: bool) -> list[Cell]:
    gain = between(*(case[end] for end in ("gain", "low", "high", "half")))
    dense = case["side"] == "dense" or gain == NONE
    name = str(case["name"])
    return [(name, "good") if guest else name, duration(case["median_us"]), NONE if dense else gain]
