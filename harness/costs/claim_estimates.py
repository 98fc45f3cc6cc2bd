"""What a check has left to measure, a run for each suite, and about how long that will take.

    run = RUN_S + what suite_estimates.py says of its cases + ENERGY_S a case and process

Kernels without rows on that GPU are taken as typical, and named. A suite of files below --data that
are not given is left out, and named as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sparsebench.harness.claims.checking import Evidence, Wanted, measures_energy, missing
from sparsebench.harness.costs.suite_estimates import Costs, plan_there
from sparsebench.results.formatting import amount

RUN_S = 12.0  # of a run, beside its contests: 11 s of it are ceilings on an H200
ENERGY_S = 3.5  # of a window, with the wait for the counter


@dataclass(frozen=True)
class Look:
    """A run that is left to make. Seconds are None where no rows tell."""

    suite: str
    claims: tuple[str, ...]
    contests: int
    cases: int
    seconds: float | None
    unknown: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """Say what it is: `announced: 18 contests, 90 cases, about 32 s; for blast-2025`."""
        time = f", about {self.seconds:.0f} s" if self.seconds is not None else ""
        typical = f" ({', '.join(self.unknown)} taken as typical)" if self.unknown else ""
        counts = f"{amount(self.contests, 'contest')}, {amount(self.cases, 'case')}"
        return f"{self.suite}: {counts}{time}{typical}; for {', '.join(self.claims)}"


def looks(found: Evidence, device: str, replicates: int, there: Costs | None) -> list[Look]:
    """Return the runs that a check of so many processes will make, before any confirming one."""
    return [_look(wanted, replicates, there) for wanted in missing(found, device)]


def left_out(found: Evidence) -> list[str]:
    """Say which suites are not measured since their files are not here, a line each."""
    by_suite: dict[str, list[str]] = {}
    for part in found.all_parts:
        if not part.contests:
            by_suite.setdefault(part.suite.name, []).append(part.written.name)
    return [
        f"{suite}: left out, its problems are files below --data; for {', '.join(names)}"
        for suite, names in by_suite.items()
    ]


def _look(wanted: Sequence[Wanted], replicates: int, there: Costs | None) -> Look:
    suite = wanted[0][0].suite
    cases = [*dict.fromkeys(case for part, problems in wanted for case in part.cases(problems))]
    claims = tuple(dict.fromkeys(part.written.name for part, _ in wanted))
    contests = len({problem for _, problems in wanted for problem in problems})
    if there is None:
        return Look(suite.name, claims, contests, len(cases), None)
    told = plan_there(suite, there, f"case={'|'.join(cases)}", replicates)
    energy_s = ENERGY_S * len(cases) * replicates if measures_energy(wanted[0][0]) else 0.0
    seconds = RUN_S + told["estimate_s"] + energy_s
    return Look(suite.name, claims, contests, len(cases), seconds, tuple(told["unknown"]))
