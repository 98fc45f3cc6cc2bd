"""A claim with its planned problems: everything but cells that a verdict needs.

The harness makes it, because planning expands a suite; reports and sites read it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sparsebench.results.claims.cells import ClaimCell, cells, file_problems
from sparsebench.results.claims.schema import Claim, ClaimFile
from sparsebench.results.claims.verdict import Verdict, judge
from sparsebench.results.tables.analysis import Analysis


@dataclass(frozen=True)
class PlannedClaim:
    """A claim, planned.

    problems     ids of the problems of each test
    refused      by test, the reason why it was not run
    model_cells  cells of its tests about models, which come from files and not from runs
    """

    written: ClaimFile
    problems: Mapping[str, Collection[str]]
    refused: Mapping[str, str] = field(default_factory=dict)
    model_cells: Sequence[ClaimCell] = ()

    @property
    def name(self) -> str:
        return self.written.name

    @property
    def claim(self) -> Claim:
        return self.written.claim

    def cells(self, analysis: Analysis) -> list[ClaimCell]:
        """Return the cells of all its tests in a run."""
        return [
            cell
            for test in self.claim.tests
            for cell in cells(
                test,
                {
                    *self.problems.get(test.name, ()),
                    *file_problems(test, self.claim.measured(test), analysis.run),
                },
                analysis,
            )
        ]

    def verdicts(self, measured: Sequence[ClaimCell]) -> list[Verdict]:
        """Return the verdicts on its cells, one per device, or one without a device."""
        return judge(self.name, self.claim, measured, self.problems, self.refused)


def problems(claims: Iterable[PlannedClaim]) -> set[str]:
    """Return the ids of the problems of all tests of some claims."""
    return {each for claim in claims for ids in claim.problems.values() for each in ids}
