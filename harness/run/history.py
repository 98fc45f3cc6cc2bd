"""What the earlier processes of a run chose, timed and found right, by case id.

choices     taken without a search: in a look those of every earlier process; on a GPU always those
            of references, whose search takes 5 s
candidates  what the first process timed: a later one searches among its finalists
            (kernels/_common/search.py)
checked     configurations whose whole output was right: a part suffices the next time
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparsebench.harness.bench.contest_state import configuration
from sparsebench.harness.plan.suite import Contest
from sparsebench.results.record import Case, Row, Status


@dataclass
class History:
    """The earlier processes of a run.

    share             pass the choice of an ok row to every later process
    share_references  the same for references alone
    """

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
                self.choices |= {case: row.choice} if row.choice else {}
            elif row.candidates and row.replicate < self.timed.setdefault(case, row).replicate:
                self.timed[case] = row
            if same_run and not row.judged_part:
                self.checked.setdefault(case, set()).add(configuration(row))

    def options(self, contest: Contest) -> dict[str, Any]:
        """Return the options of a contest that follow; a twin takes its original's choice."""
        cases = [Case(contest.problem, contender) for contender in contest.contenders]
        return {
            "pinned": {
                c.id: self.choices[of] for c in cases if (of := c.original.id) in self.choices
            },
            "timed": {c.id: self.timed[c.id].candidates for c in cases if c.id in self.timed},
            "checked": {c.id: sorted(self.checked[c.id]) for c in cases if c.id in self.checked},
        }
