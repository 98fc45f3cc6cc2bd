"""A check of claims: measure what is missing, confirm what is promising, and judge.

    claims ─> plans ─> cells in the runs that were given
                    ─> problems without a cell, by suite ─> a run for each suite   DIR/SUITE
                    ─> the best cell of each `exists` ─> measured alone  DIR/SUITE-confirmed
           ─> verdicts                                                   DIR/verdicts.json

One cell decides an `exists`, so a single process screens its problems, unless another test needs
them in all processes. A confirming run has FEWEST fresh processes or more, and starts from the
suite of its screening (run/repeat.py); if another cell is the best one then, it is confirmed too. A
check with fewer processes is a look, and confirms nothing.

A run whose time ends stays in parts, DIR/SUITE.parts, and is no evidence. The next check into the
same folder measures the rest.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from sparsebench.errors import SuiteError
from sparsebench.harness.bench.energy import NoMeter
from sparsebench.harness.claims.claim_plan import TestPlan, plan_tests, planned_claim, refusal_of
from sparsebench.harness.plan.suite import Suite
from sparsebench.harness.run import repeat, run_json
from sparsebench.harness.run.measure import RunOptions
from sparsebench.results.claims.cells import ClaimCell, cells, file_problems
from sparsebench.results.claims.model_cells import model_cells, read_model_file
from sparsebench.results.claims.planned import PlannedClaim
from sparsebench.results.claims.schema import ClaimFile
from sparsebench.results.claims.verdict import Verdict
from sparsebench.results.formatting import amount
from sparsebench.results.run import bundle, store
from sparsebench.results.statistics.ratio import FEWEST
from sparsebench.results.tables.analysis import analyse

VERDICTS_SCHEMA = "sparsebench/verdicts@1"
CELL_FIELDS = "run", "fields", "subject", "baseline", "value", "low", "high", "kind", "reason"

FEW = 8  # runs are read in seconds, without progress
CONFIRMING = 2  # most rounds of confirming runs

Show = Callable[[int, int, str], None]

Gap = tuple[TestPlan, set[str]]
"""A test, and its problems that have no cell."""


@dataclass(frozen=True)
class Missing:
    """A run that is to be made: gaps of one suite, and the number of processes."""

    gaps: Sequence[Gap]
    replicates: int

    @property
    def suite(self) -> Suite:
        return self.gaps[0][0].suite

    @property
    def energy(self) -> bool:
        return measures_energy(self.gaps[0][0])

    @property
    def cases(self) -> list[str]:
        return [*dict.fromkeys(case for plan, ids in self.gaps for case in plan.cases(ids))]

    @property
    def sentence(self) -> str:
        """Describe it: `announced: 18 contests, 90 cases; for blast-2025`."""
        claims = dict.fromkeys(plan.written.name for plan, _ in self.gaps)
        contests = len({problem for _, problems in self.gaps for problem in problems})
        counts = f"{amount(contests, 'contest')}, {amount(len(self.cases), 'case')}"
        return f"{self.suite.name}: {counts}; for {', '.join(claims)}"


@dataclass
class ClaimEvidence:
    """The plan of some claims, and their cells in runs and files.

    plans    of each claim, by name
    cells    of each claim, over all runs that were read
    files    of each claim, over the JSON files of experiments
    refusals why a test was not run, by claim and test
    runs     paths of the runs, by their name in cells
    """

    written: Sequence[ClaimFile]
    plans: dict[str, list[TestPlan]] = field(default_factory=dict)
    cells: dict[str, list[ClaimCell]] = field(default_factory=dict)
    files: dict[str, list[ClaimCell]] = field(default_factory=dict)
    refusals: dict[tuple[str, str], str] = field(default_factory=dict)
    runs: dict[str, Path] = field(default_factory=dict)

    def read(self, paths: Sequence[Path], show: Show = lambda done, total, run: None) -> None:
        """Add the cells of runs and JSON files. Raises ResultError if one cannot be read."""
        planned = {problem for plan in self.all_plans for problem in plan.problems}
        for number, path in enumerate(paths):
            if len(paths) > FEW:
                show(number, len(paths), path.name)
            if not path.is_dir():
                file = read_model_file(path)
                for each in self.written:
                    for test in each.claim.tests:
                        more = model_cells(test, file, path.stem)
                        self.files.setdefault(each.name, []).extend(more)
                continue
            # of a problem from a file, only the run knows whether a test includes it
            run = store.read(path, lambda each: each.id in planned or each.source is not None)
            name = path.name if path.name not in self.runs else f"{path.parent.name}/{path.name}"
            if name in self.runs:
                raise SuiteError(f"{path}: expected each run once, found {name} twice")
            self.runs[name] = path
            problems = {row.case.problem.id for row in run.rows}
            tested = []
            for plan in self.all_plans:  # some problems only a run with its files can name
                measured = plan.written.claim.measured(plan.test)
                ids = plan.problems | file_problems(plan.test, measured, run)
                tested.append((plan, ids & problems))
            if any(ids for _, ids in tested):
                analysis = analyse(run)
                for plan, ids in tested:
                    new = cells(plan.test, ids, analysis) if ids else ()
                    self.cells[plan.written.name] += [replace(cell, run=name) for cell in new]

    @property
    def all_plans(self) -> list[TestPlan]:
        return [plan for plans in self.plans.values() for plan in plans]

    def planned(self) -> list[PlannedClaim]:
        return [
            planned_claim(c, self.plans[n], self._refusals(n), self.files.get(n, ()))
            for n, c in ((each.name, each) for each in self.written)
        ]

    def verdicts(self) -> dict[str, list[Verdict]]:
        """Return the verdicts on each claim, one per device."""
        planned = self.planned()
        return {c.name: c.verdicts([*self.cells[c.name], *c.model_cells]) for c in planned}

    def _refusals(self, name: str) -> dict[str, str]:
        return {test: reason for (claim, test), reason in self.refusals.items() if claim == name}


def evidence(
    written: Sequence[ClaimFile],
    runs: Iterable[Path] = (),
    data: Path | None = None,
    show: Show = lambda done, total, run: None,
) -> ClaimEvidence:
    """Plan claims and read runs, which is all that a verdict without a GPU needs.

    `show` receives the number of runs that were read, the number of all, and the next one's name.
    """
    result = ClaimEvidence(written)
    result.plans = {each.name: plan_tests(each, data) for each in written}
    result.cells = {each.name: [] for each in written}
    result.read([*runs], show)
    return result


def check(
    written: Sequence[ClaimFile],
    flags: run_json.Flags,
    runs: Iterable[Path],
    out: Path,
    options: RunOptions,
    engine: repeat.Engine,
    planned: Callable[[ClaimEvidence], None] = lambda result: None,
) -> ClaimEvidence:
    """Measure what no run has, confirm promising cells, and write everything below `out`.

    Runs below `out` count, and those in parts are resumed. `planned` is called with what is known
    before anything is measured. Raises Unfinished if the time ends.
    """
    result = evidence(written, [*runs, *store.runs_in(out)], flags.data)
    for plan in result.all_plans:
        if reason := refusal_of(plan, flags.device):
            result.refusals[plan.written.name, plan.test.name] = reason
    planned(result)
    _Check(result, flags, out, options, engine).run()
    out.mkdir(parents=True, exist_ok=True)
    store.write_json(out / "verdicts.json", to_json(result))
    return result


@dataclass(frozen=True)
class _Check:
    """Measures what claims need, and adds the cells to the evidence."""

    evidence: ClaimEvidence
    flags: run_json.Flags
    out: Path
    options: RunOptions
    engine: repeat.Engine

    def run(self) -> None:
        result = self.evidence
        for left in missing(result, self.flags.device, self.flags.replicates):
            try:
                result.read([self._measure(left)])
            except NoMeter as error:
                for plan, _ in left.gaps:
                    result.refusals[plan.written.name, plan.test.name] = str(error)
        if self.flags.replicates >= FEWEST:
            for _ in range(CONFIRMING):
                for screening, chosen in self._promising().items():
                    result.read([self._confirm(screening, chosen)])

    def _measure(self, left: Missing) -> Path:
        suite, only = left.suite, f"case={'|'.join(left.cases)}"
        flags = replace(self.flags, only=only, replicates=left.replicates, energy=left.energy)
        names = (f"{suite.name}-{number}" if number > 1 else suite.name for number in count(1))
        path = next(self.out / name for name in names if not (self.out / name).exists())
        return self.engine(suite, flags, path, self.options)

    def _promising(self) -> dict[str, list[ClaimCell]]:
        """Return the cells that a confirming run would decide, by the run that screened them."""
        chosen: dict[str, dict[tuple[str, ...], ClaimCell]] = {}
        for verdicts in self.evidence.verdicts().values():
            for judged in (judged for verdict in verdicts for judged in verdict.tests):
                if cell := judged.confirm:
                    chosen.setdefault(cell.run, {}).setdefault(cell.case_ids, cell)
        return {run: list(cells.values()) for run, cells in chosen.items()}

    def _confirm(self, screening: str, chosen: Sequence[ClaimCell]) -> Path:
        """Measure chosen cells of a run again, alone, in fresh processes.

        The name is numbered if a run has confirmed other cells, or came out unreliable. If two
        screenings share a name, it contains the folder.
        """
        path, name = self.evidence.runs[screening], screening.replace("/", "-")
        names = (f"{name}-confirmed{f'-{n}' if n > 1 else ''}" for n in count(1))
        out = next(self.out / name for name in names if not (self.out / name).exists())
        run = repeat.read_bundle(path)
        ids = dict.fromkeys(case for cell in chosen for case in cell.case_ids)
        rows = {row.case.id: row for row in run.rows}
        named = [{"case_id": i, "scope": rows[i].scope, "cache": rows[i].cache} for i in ids]
        origin = {
            "manifest_sha256": bundle.identity(path),
            "cells": [cell for cell in named if not rows[cell["case_id"]].case.contender.baseline],
            "screened": len({row.case.id for row in run.rows if not row.case.contender.twin}),
        }
        setup = repeat.Setup(self.flags.device, self.flags.data, out, self.options, self.engine)
        only = f"case={'|'.join(ids)}"
        replicates = self.flags.replicates
        return repeat.measure_again(
            run, setup, {"confirms": origin}, only=only, replicates=replicates
        )


def missing(result: ClaimEvidence, device: str, replicates: int) -> list[Missing]:
    """Return the runs that measure every problem without a cell on such a device."""
    gaps: list[Gap] = []
    for plan in result.all_plans:
        name = plan.written.name
        if (name, plan.test.name) in result.refusals:
            continue
        measured = {cell.problem for cell in result.cells[name] if cell.test == plan.test.name}
        gaps.append((plan, plan.problems - measured))
    return runs_for(gaps, replicates)


def left_out(result: ClaimEvidence) -> list[str]:
    """Return a line for each suite that is not measured because its source files are missing."""
    by_suite: dict[str, list[str]] = {}
    for plan in result.all_plans:
        if not plan.contests:
            by_suite.setdefault(plan.suite.name, []).append(plan.written.name)
    return [
        f"{suite}: left out, because its problems are files below --data; for {', '.join(claims)}"
        for suite, claims in by_suite.items()
    ]


def runs_for(gaps: Sequence[Gap], replicates: int) -> list[Missing]:
    """Return the runs that close gaps: one for each suite, and one for those that it screens.

    Parts about energy are separate, because energy takes seconds per case.
    """
    in_all: dict[str, set[str]] = {}
    for plan, left in gaps:
        decided_by_one = plan.test.quantifier == "exists" and len(plan.problems) > 1
        if not decided_by_one or replicates < FEWEST or measures_energy(plan):
            in_all.setdefault(plan.suite.text, set()).update(left)
    groups: dict[tuple[str, bool, int], list[Gap]] = {}
    for plan, left in gaps:
        once = left - in_all.get(plan.suite.text, set())
        for processes, ids in ((replicates, left - once), (1, once)):
            if ids:
                key = plan.suite.text, measures_energy(plan), processes
                groups.setdefault(key, []).append((plan, ids))
    return [Missing(group, processes) for (_, _, processes), group in groups.items()]


def measures_energy(plan: TestPlan) -> bool:
    """Return whether a test is about energy, so that its runs need an energy window a case."""
    return plan.test.metric == "energy_saved"


def to_json(result: ClaimEvidence) -> dict[str, Any]:
    """Return the verdicts with their cells."""
    claims = {
        name: [
            {
                "device": verdict.device,
                "verdict": str(verdict.word),
                "basis": str(verdict.basis),
                "leans": verdict.tendency and str(verdict.tendency),
                "sentence": verdict.sentence,
                "tests": [
                    {
                        "test": judged.test.name,
                        "threshold": judged.test.sentence,
                        "verdict": str(judged.word),
                        "basis": str(judged.basis),
                        "why": judged.why,
                        "deciding": [
                            {n: cell.to_json()[n] for n in CELL_FIELDS} for cell in judged.deciding
                        ],
                    }
                    for judged in verdict.tests
                ],
            }
            for verdict in verdicts
        ]
        for name, verdicts in result.verdicts().items()
    }
    return {"schema": VERDICTS_SCHEMA, "claims": claims}
