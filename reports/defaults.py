"""What users get beside the best kernel for its format, in every published cell.

default    the contender that names no kernel: what layers and `matmul` run
cell       a weight in one format in one contest, as a kernel with a cold cache, for which a
           named kernel has a time, too
behind     default takes more than RATIO times the time of the best kernel, plus SLACK_US
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sparsebench.reports.findings import contender_name
from sparsebench.reports.headline import PublishedRun
from sparsebench.reports.tables import markdown_table
from sparsebench.results.formatting import duration
from sparsebench.results.problem_names import problem_name
from sparsebench.results.tables.families import DEFAULT, is_ours
from sparsebench.results.tables.frame import fields, records

RATIO, SLACK_US = 1.03, 0.5
COLUMNS = ["run", "problem", "stored as", "users get", "time", "the best", "its time"]

Case = Mapping[Any, Any]


@dataclass(frozen=True)
class UsersCell:
    """What users get in a cell, the best named kernel, and the best of ours, if there is one."""

    users: Case
    best: Case
    best_of_ours: Case | None

    def is_behind(self, other: Case | None) -> bool:
        """Return whether users wait longer than for another case, if there is one."""
        if other is None:
            return False
        return bool(self.users["median_us"] > RATIO * other["median_us"] + SLACK_US)


def markdown(runs: Mapping[str, PublishedRun]) -> str:
    """Return in how many cells users get the best kernel, and a table of the others."""
    cells = [(run, cell) for run in runs.values() for cell in cells_of(run)]
    ours = [cell for _, cell in cells if cell.best_of_ours]
    count = sum(not cell.is_behind(cell.best_of_ours) for cell in ours)
    behind = [(run, cell) for run, cell in cells if cell.is_behind(cell.best)]
    within = f"within {100 * (RATIO - 1):.0f} % + {SLACK_US:g} µs of"
    text = (
        "A cell is one weight in one format, in a contest of kernels with a cold cache. "
        f"The contender `default` is {within} the best kernel of ours for its format in "
        f"{count} of {len(ours)} cells that name one, and {within} the best of all kernels for its "
        f"format, peers included, in {len(cells) - len(behind)} of {len(cells)}."
    )
    if not behind:
        return text
    return f"{text} The others:\n\n{markdown_table(COLUMNS, [_line(*each) for each in behind])}"


def cells_of(run: PublishedRun) -> Iterator[UsersCell]:
    """Yield the cells of a run."""
    timed = run.timed
    if timed.empty:
        return
    here = timed[(timed.scope == "kernel") & (timed.cache == "cold")]
    for _, contest in here.groupby(["place", "format", "tile"], sort=False):
        if DEFAULT not in contest.kernel.array:  # most contests; their records would take 8 s
            continue
        by_time = records(contest.sort_values("median_us"))
        users = next(case for case in by_time if case["kernel"] == DEFAULT)
        named = [case for case in by_time if case["kernel"] != DEFAULT]
        if named:
            ours = (case for case in named if is_ours(case["kernel"]))
            yield UsersCell(users, named[0], next(ours, None))


def _line(run: PublishedRun, cell: UsersCell) -> list[str]:
    names = ["op", *(name for name in fields(run.timed) if name != "sparsity"), "level"]
    return [
        f"[{run.name}](/{run.home})",
        problem_name(cell.users, names),
        f"{cell.users['format']} {cell.users['params']}".strip(),
        contender_name(cell.users),
        duration(cell.users["median_us"]),
        contender_name(cell.best),
        duration(cell.best["median_us"]),
    ]
