"""A claim with what its tests ask for: all that judging it needs beside cells.

The harness makes it, since a suite must be expanded for it; reports and sites read it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sparsebench.results.analysis import Analysis
from sparsebench.results.claims.cells import Cell, cells, of_files
from sparsebench.results.claims.schema import Claim, Written
from sparsebench.results.claims.verdict import Verdict, judge
from sparsebench.results.store import Run


@dataclass(frozen=True)
class PlannedClaim:
    """A claim, planned.

    wanted   by test, the ids of its problems
    bounds   by test and problem, the largest speed-up at the efficiency of dense
    beyond   tests that no kernel as efficient as the baseline can meet
    refused  by test, why it was not run
    files    cells of its tests about files of commands, which come from no run
    """

    written: Written
    wanted: Mapping[str, Collection[str]]
    bounds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    beyond: Collection[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[Cell] = ()

    @property
    def name(self) -> str:
        """Return the claim's name."""
        return self.written.name

    @property
    def claim(self) -> Claim:
        """Return the claim."""
        return self.written.claim

    def cells(self, run: Run, found: Analysis) -> list[Cell]:
        """Return the cells of all its tests in a run."""
        made = []
        for test in self.claim.tests:
            measure = self.claim.measured(test)
            ids = {*self.wanted.get(test.name, ()), *of_files(test, measure, run)}
            made += cells(test, ids, run, found)
        return made

    def verdicts(self, known: Sequence[Cell]) -> list[Verdict]:
        """Return its verdicts on its cells, one a device; a single one where there are none."""
        return judge(self.name, self.claim, known, self.wanted, self.refused)


def problems(asked: Iterable[PlannedClaim]) -> set[str]:
    """Return the ids of all problems that some claims ask for."""
    return {each for one in asked for ids in one.wanted.values() for each in ids}
