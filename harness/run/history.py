"""What the earlier processes of a run chose, timed and found right, by case id.

choices     taken without a search: those of another run (`pinned`); in a look those of every
            earlier process; on a GPU always those of references, whose search takes 5 s
candidates  what the first process timed: a later one searches among its finalists
            (kernels/_common/search.py)
checked     configurations whose whole output was right: a part suffices the next time
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsebench.harness.bench.contest_state import configuration
from sparsebench.harness.plan.suite import Contest
from sparsebench.results.record import Case, Row, Status

Pinned = Mapping[str, Mapping[str, Any]]
"""A kernel's choice (Row.choice) by case id."""


def pinned_in(rows: Iterable[Row]) -> Pinned:
    """Return what kernels chose in the ok rows."""
    return {row.case.id: row.choice for row in rows if row.status is Status.OK and row.choice}


def pinned_by_process(rows: Sequence[Row]) -> list[Pinned]:
    """Return what kernels chose in each process; where a process has no ok row, any other's."""
    numbers = sorted({row.replicate for row in rows})
    every = pinned_in(rows)
    return [{**every, **pinned_in(r for r in rows if r.replicate == n)} for n in numbers]


@dataclass
class History:
    """The earlier processes of a run.

    pinned            choices of another run: process p takes those of process p modulo their number
    share             pass the choice of an ok row to every later process
    share_references  the same for references alone
    """

    pinned: Sequence[Pinned] = ()
    share: bool = True
    share_references: bool = False
    choices: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    timed: dict[str, Row] = field(default_factory=dict)
    checked: dict[str, set[str]] = field(default_factory=dict)

    def remember(self, rows: Iterable[Row], *, same_run: bool = True) -> None:
        """Remember rows of an earlier process, of this run or of another one."""
        for row in (row for row in rows if row.status is Status.OK):
            case = row.case.id
            if self.share or (self.share_references and row.reference):
                self.choices |= pinned_in([row])
            elif row.candidates and row.replicate < self.timed.setdefault(case, row).replicate:
                self.timed[case] = row
            if same_run:
                self.checked.setdefault(case, set()).add(configuration(row))

    def options(self, contest: Contest, replicate: int) -> dict[str, Any]:
        """Return the options of a contest that follow; a twin takes its original's choice."""
        pinned = self.pinned[replicate % len(self.pinned)] if self.pinned else {}
        choices = {**self.choices, **pinned}
        cases = [Case(contest.problem, contender) for contender in contest.contenders]
        return {
            "pinned": {c.id: choices[of] for c in cases if (of := c.original.id) in choices},
            "timed": {c.id: self.timed[c.id].candidates for c in cases if c.id in self.timed},
            "checked": {c.id: sorted(self.checked[c.id]) for c in cases if c.id in self.checked},
        }
