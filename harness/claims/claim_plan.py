"""Claims by name, and from a claim to the contests that test it.

    suites/claims/NAME.yaml                  NAME
    entry point of sparsebench.claims        a package whose *.yaml files are claims
    a path that ends in .yaml                that file

    test ─> its suite, expanded ─> contests at its fields ─> subjects and baselines in them

If the suite cannot provide what a test needs, the error names the line of the claim. If this
machine cannot run a test or has too little memory, the reason is known before anything is drawn. A
suite that reads files from --data has no contests without them; its cells then come from the runs
that are given.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path

import torch
import yaml

from sparsebench._discovery import documents
from sparsebench.errors import SuiteError
from sparsebench.harness.bench.prepare import unsupported_on
from sparsebench.harness.catalog import load_op, suites
from sparsebench.harness.plan.document import document
from sparsebench.harness.plan.selection import only, text
from sparsebench.harness.plan.suite import Contest, Suite, expand, read
from sparsebench.results.claims.cells import ClaimCell, covers, matches
from sparsebench.results.claims.planned import PlannedClaim
from sparsebench.results.claims.schema import Chosen, ClaimFile, Measure, Test, parse
from sparsebench.results.record import Case, Contender

GIB = 2**30


@dataclass(frozen=True)
class TestPlan:
    """A test of a claim, with the contests of its subjects and baselines.

    There are no contests if the source files of its suite are missing.
    """

    written: ClaimFile
    test: Test
    suite: Suite
    contests: tuple[Contest, ...]

    @property
    def problems(self) -> set[str]:
        return {contest.problem.id for contest in self.contests}

    def cases(self, problems: Iterable[str]) -> list[str]:
        ids = set(problems)
        contests = [contest for contest in self.contests if contest.problem.id in ids]
        return [Case(c.problem, contender).id for c in contests for contender in c.contenders]


def plan_tests(written: ClaimFile, data: Path | None = None) -> list[TestPlan]:
    """Plan every test of a claim. Raises SuiteError with the line of a test that does not fit."""
    planned = []
    for number, test in enumerate(written.claim.tests):
        if test.of_file:  # there is nothing to run
            continue
        place = ("tests", number, "measure") if test.measure else ("measure",)
        measure = test.measure or written.claim.measure
        assert measure
        name = f"{written.name}-{number + 1}" if test.measure else written.name
        if measure.data and data is None and measure.suite in suites():
            planned.append(TestPlan(written, test, Suite(measure.suite, "", "", ()), ()))
            continue
        contents = measure.model_dump_json(exclude={"only", "energy", "data"})
        try:
            suite = _suite("" if measure.suite else name, contents, data)
            contests = only(suite.contests, measure.only)
        except SuiteError as error:
            raise SuiteError(f"{written.at(*place)}: measure: {error}") from error
        plan = TestPlan(written, test, suite, tuple(contests))
        planned.append(_narrow(plan, number, measure))
    return planned


def planned_claim(
    written: ClaimFile,
    planned: Sequence[TestPlan],
    refused: Mapping[str, str] | None = None,
    files: Sequence[ClaimCell] = (),
) -> PlannedClaim:
    """Return a planned claim, for reports and sites."""
    problems = {plan.test.name: plan.problems for plan in planned}
    return PlannedClaim(written, problems, refused or {}, files)


def refusal_of(plan: TestPlan, device: str) -> str:
    """Return why a test cannot run on a device; "" if it can."""
    if not plan.contests:
        return ""
    if device.startswith("cuda"):
        memory = torch.cuda.get_device_properties(device).total_memory
        if reason := too_large(plan, memory):
            return reason
    for who, chosen in (("baseline", plan.test.baseline), ("subject", plan.test.subject)):
        pairs = [(c.problem, k) for c in plan.contests for k in _matching(chosen, c)]
        why = ((k.kernel, unsupported_on(device, p, k)) for p, k in pairs)
        reasons = Counter(f"{kernel}: {reason}" for kernel, reason in why if reason)
        if reasons.total() == len(pairs):
            return f"no {who} is supported here: {reasons.most_common(1)[0][0]}"
    return ""


def too_large(plan: TestPlan, memory: int) -> str:
    """Return why the smallest problem, stored dense, does not fit a memory; "" if it does."""
    problems = [contest.problem for contest in plan.contests]
    sizes = [load_op(problem.op).held_bytes(problem) for problem in problems]
    if min(sizes) <= memory:
        return ""
    needs = f"its smallest problem needs {min(sizes) / GIB:.3g} GiB"
    return f"it does not fit the memory: {needs}, the device has {memory / GIB:.3g} GiB"


@cache
def _suite(name: str, measure: str, data: Path | None) -> Suite:
    """Expand the suite that a claim names, or the one written in the claim; `measure` is JSON."""
    contents = Measure.model_validate_json(measure)
    if contents.suite is not None:
        return read(contents.suite, data)
    listed = contents.model_dump(exclude={"suite", "only", "energy", "data"})
    written = {"schema": "sparsebench/suite@1", "title": f"Contests of the claim {name}", **listed}
    return expand(f"{name}.yaml", yaml.safe_dump(written, sort_keys=False, width=100), data)


def _narrow(plan: TestPlan, number: int, measure: Measure) -> TestPlan:
    test, suite = plan.test, plan.suite

    def where(key: str) -> str:
        return plan.written.at("tests", number, key)

    ops = {contest.problem.op for contest in plan.contests}
    if test.over and test.over not in ops:
        expected = f"an op of its problems, one of {', '.join(sorted(ops))}"
        raise SuiteError(f"{where('over')}: over: expected {expected}; found {test.over!r}")
    contests = [c for c in plan.contests if covers(test, c.problem.fields)]
    for name, value in test.at.items():
        values = value if isinstance(value, list) else [value]
        present = {text(c.problem.fields[name]) for c in plan.contests if name in c.problem.fields}
        missing = [each for each in values if text(each) not in present]
        if missing:
            expected = f"{name} of a problem of {suite.name}, one of {', '.join(sorted(present))}"
            raise SuiteError(f"{where('at')}: at.{name}: expected {expected}; found {missing[0]!r}")
    if not contests:
        raise SuiteError(f"{where('at')}: at: expected a problem with all of these, found none")
    complete = []
    for who, chosen in (("subject", test.subject), ("baseline", test.baseline)):
        if not any(_matching(chosen, contest) for contest in contests):
            expected = f"a contender of {suite.name} at these problems"
            raise SuiteError(f"{where(who)}: {who}: expected {expected}, found none like it")
    for contest in contests:
        sides = [_matching(chosen, contest) for chosen in (test.subject, test.baseline)]
        both = [contender for contender in sides[0] if contender in sides[1]]
        if both:
            expected = "no contender that is subject and baseline"
            raise SuiteError(f"{where('subject')}: expected {expected}, found {both[0].label}")
        if all(sides):
            complete.append(replace(contest, contenders=(*sides[1], *sides[0])))
    if not complete:
        raise SuiteError(f"{where('at')}: expected a problem with both sides, found none")
    if test.metric == "energy_saved" and not measure.energy:
        expected = "energy: true in measure, for a metric of energy"
        raise SuiteError(f"{where('metric')}: metric: expected {expected}; found energy: false")
    return replace(plan, contests=tuple(complete))


def _matching(chosen: Chosen, contest: Contest) -> list[Contender]:
    return [
        each
        for each in contest.contenders
        if matches(chosen, {"format": each.format, "kernel": each.kernel, "options": each.options})
    ]


def claims() -> dict[str, Traversable]:
    """Return the file of every claim by its name. Raises SuiteError if a name occurs twice."""
    return documents("suites.claims")


def load(name: str) -> ClaimFile:
    """Read a claim by name or from a file. Raises SuiteError with the file and the line."""
    return parse(*document("suites.claims", "claim", name))


def read_claims(names: list[str]) -> list[ClaimFile]:
    """Read the claims of these names, or all known claims without any."""
    selected = [load(name) for name in names or claims()]
    twice = [name for name, count in Counter(each.name for each in selected).items() if count > 1]
    if twice:
        raise SuiteError(f"expected each claim once, found {min(twice)} twice")
    return selected
