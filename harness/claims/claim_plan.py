"""A claim to the contests that would show it: each test with its problems and contenders.

    test ─> its suite, expanded ─> contests at its fields ─> subjects and baselines in them

Whatever cannot be met by the suite is an error with the line of the claim. What this machine cannot
run, or has no memory for, is a reason, before anything is drawn. A suite of files below --data has
no contest without them: its cells are then those of the runs that are given.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path

import torch
import yaml

from sparsebench.errors import SuiteError
from sparsebench.harness.bench.prepare import unsupported
from sparsebench.harness.catalog import load_op, suites
from sparsebench.harness.machine.device import simulated
from sparsebench.harness.patterns._mask import level
from sparsebench.harness.plan.selection import only, text
from sparsebench.harness.plan.suite import Contest, Suite, expand, read
from sparsebench.kernels._kernel import DTYPES, OUTPUTS
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.claims.cells import Cell, covers, matches
from sparsebench.results.claims.planned import PlannedClaim
from sparsebench.results.claims.schema import Chosen, ClaimFile, Measure, Test
from sparsebench.results.record import Case, Contender, Problem

GIB = 2**30


@dataclass(frozen=True)
class Part:
    """A test of a claim, and what has to be run for it.

    contests  with the subjects and baselines alone; none where its files are not here
    """

    written: ClaimFile
    test: Test
    suite: Suite
    contests: tuple[Contest, ...]

    @property
    def problems(self) -> set[str]:
        """Return the ids of its problems."""
        return {contest.problem.id for contest in self.contests}

    def cases(self, problems: Iterable[str]) -> list[str]:
        """Return the ids of the cases of some problems."""
        asked = set(problems)
        mine = [contest for contest in self.contests if contest.problem.id in asked]
        return [Case(c.problem, contender).id for c in mine for contender in c.contenders]


def parts(written: ClaimFile, data: Path | None = None) -> list[Part]:
    """Plan every test of a claim; SuiteError names the line of what its suite does not have."""
    found = []
    for number, test in enumerate(written.claim.tests):
        if test.of_file:  # nothing is to be run
            continue
        own = ("tests", number, "measure") if test.measure else ("measure",)
        measure = test.measure or written.claim.measure
        assert measure
        name = f"{written.name}-{number + 1}" if test.measure else written.name
        if measure.data and data is None and measure.suite in suites():
            found.append(Part(written, test, Suite(measure.suite, "", "", ()), ()))
            continue
        with _placed(written.at(*own)):
            asked = measure.model_dump_json(exclude={"only", "energy", "data"})
            suite = _suite("" if measure.suite else name, asked, data)
            contests = only(suite.contests, measure.only)
        part = Part(written, test, suite, tuple(contests))
        found.append(_narrowed(part, number, measure))
    return found


def asked(
    written: ClaimFile,
    planned: Iterable[Part],
    ceilings: Ceilings | None = None,
    refused: Mapping[str, str] | None = None,
    files: Sequence[Cell] = (),
) -> PlannedClaim:
    """Return a planned claim as reports and sites read it, with its bounds."""
    own = list(planned)
    found = {part.test.name: bounds(part, ceilings) for part in own}
    beyond = [part.test.name for part in own if out_of_reach(part, found[part.test.name])]
    wanted = {part.test.name: part.problems for part in own}
    return PlannedClaim(written, wanted, found, beyond, refused or {}, files)


def most(problem: Problem, ceilings: Ceilings | None = None) -> float:
    """Return how many times as fast as dense a kernel of equal efficiency can be, at most.

    Without ceilings the larger of the ratios of FLOPs and of bytes: no device allows more. With
    them the ratio of both bounds, none of which is below an empty launch. No index counts, but for
    2:4 a bit an element: no tensor core multiplies it with fewer.
    """
    op, dtype, whole = load_op(problem.op), problem["dtype"], elements(problem)
    fields = op.sizes(problem.fields)
    here = [name for name in whole if op.prunes(problem.fields, name)]
    pruned = dict.fromkeys(whole, 0.0)
    pruned |= {name: level(fields, op.operands[name].shape) for name in here}
    kept = {name: round(size * (1 - pruned[name])) for name, size in whole.items()}
    itemsize = DTYPES[dtype].itemsize
    (dense, dense_bytes), (sparse, sparse_bytes) = (
        (op.flops(given, nnz), op.fewest_bytes(given, nnz, itemsize))
        for given, nnz in ((op.dense(problem), whole), (problem, kept))
    )
    if problem["pattern"].startswith(("two_four", "spense")):  # half of the 2:4 part are zeros
        zeros = [op.copies(fields, name) * (whole[name] - kept[name]) for name in whole]
        sparse_bytes += 2 * sum(zeros) // 8
    sides = [(dense, dense_bytes), (sparse, sparse_bytes)]
    if ceilings is None:
        return max(sides[0][0] / sides[1][0], sides[0][1] / sides[1][1])
    out = problem["m"] * fields.get("n", fields.get("vocab", 0)) * OUTPUTS[dtype].itemsize
    times = [ceilings.bound(dtype, *side, out, "cold") for side in sides]
    dense_us, sparse_us = (max(ceilings.launch_us, t[0]) if t else 0.0 for t in times)
    return dense_us / sparse_us if sparse_us else most(problem)


def elements(problem: Problem) -> dict[str, int]:
    """Return how many elements each weight of a problem has."""
    op = load_op(problem.op)
    sizes = op.sizes(problem.fields)
    shapes = {name: op.operands[name].shape for name in op.weights}
    return {name: prod(sizes[each] for each in shape) for name, shape in shapes.items()}


def bounds(part: Part, ceilings: Ceilings | None = None) -> dict[str, float]:
    """Return `most` by problem, of a test whose baseline is dense and whose metric is a time's."""
    test = part.test
    timed = test.metric in ("speedup", "of_ideal") and test.over is None
    bases = [base for contest in part.contests for base in _those(test.baseline, contest)]
    if not timed or test.at_least is None or any(base.format != "dense" for base in bases):
        return {}
    return {c.problem.id: most(c.problem, ceilings) for c in part.contests}


def out_of_reach(part: Part, found: Mapping[str, float]) -> bool:
    """Say whether no kernel as efficient as the baseline can meet a test."""
    if not found or part.test.metric != "speedup":
        return False
    short = [most < part.test.limit for most in found.values()]
    return any(short) if part.test.quantifier == "for_all" else all(short)


def refused(part: Part, device: str) -> str:
    """Say why a test cannot be run on a device; "" where it can."""
    if simulated(device) or not part.contests:
        return ""
    here = torch.device(device)
    if here.type == "cuda":
        memory = torch.cuda.get_device_properties(here).total_memory
        if reason := too_large(part, memory):
            return reason
    for who, chosen in (("baseline", part.test.baseline), ("subject", part.test.subject)):
        pairs = [(c.problem, k) for c in part.contests for k in _those(chosen, c)]
        why = Counter(f"{k.kernel}: {r}" for p, k in pairs if (r := unsupported(p, k, here)))
        if why.total() == len(pairs):
            return f"no {who} is supported here: {why.most_common(1)[0][0]}"
    return ""


def too_large(part: Part, memory: int) -> str:
    """Say whether what a dense kernel holds in the smallest problem is larger than a memory."""
    problems = [contest.problem for contest in part.contests]
    sizes = [load_op(problem.op).held_bytes(problem) for problem in problems]
    if min(sizes) <= memory:
        return ""
    needs = f"its smallest problem has {min(sizes) / GIB:.3g} GiB"
    return f"it does not fit the memory: {needs}, the device {memory / GIB:.3g} GiB"


@cache
def _suite(name: str, measure: str, data: Path | None) -> Suite:
    """Expand what a claim measures, given as JSON: a suite by name, or one written in the claim."""
    asked = Measure.model_validate_json(measure)
    if asked.suite is not None:
        return read(asked.suite, data)
    listed = asked.model_dump(exclude={"suite", "only", "energy", "data"})
    written = {"schema": "sparsebench/suite@1", "title": f"What the claim {name} needs", **listed}
    return expand(f"{name}.yaml", yaml.safe_dump(written, sort_keys=False, width=100), data)


def _narrowed(part: Part, number: int, measure: Measure) -> Part:
    """Keep the contests of a test, and the contenders in them that it asks for."""
    test, suite = part.test, part.suite

    def where(key: str) -> str:
        return part.written.at("tests", number, key)

    ops = {contest.problem.op for contest in part.contests}
    if test.over and test.over not in ops:
        expected = f"an op of its problems, one of {', '.join(sorted(ops))}"
        raise SuiteError(f"{where('over')}: over: expected {expected}; found {test.over!r}")
    contests = [c for c in part.contests if covers(test, c.problem.fields)]
    for name, value in test.at.items():
        values = value if isinstance(value, list) else [value]
        known = {text(c.problem.fields[name]) for c in part.contests if name in c.problem.fields}
        lost = [each for each in values if text(each) not in known]
        if lost:
            expected = f"{name} of a problem of {suite.name}, one of {', '.join(sorted(known))}"
            raise SuiteError(f"{where('at')}: at.{name}: expected {expected}; found {lost[0]!r}")
    if not contests:
        raise SuiteError(f"{where('at')}: at: expected a problem with all of these, found none")
    kept = []
    for who, chosen in (("subject", test.subject), ("baseline", test.baseline)):
        if not any(_those(chosen, contest) for contest in contests):
            expected = f"a contender of {suite.name} at these problems"
            raise SuiteError(f"{where(who)}: {who}: expected {expected}, found none like it")
    for contest in contests:
        sides = [_those(chosen, contest) for chosen in (test.subject, test.baseline)]
        both = [contender for contender in sides[0] if contender in sides[1]]
        if both:
            expected = "no contender that is subject and baseline"
            raise SuiteError(f"{where('subject')}: expected {expected}, found {both[0].label}")
        if all(sides):
            kept.append(replace(contest, contenders=(*sides[1], *sides[0])))
    if not kept:
        raise SuiteError(f"{where('at')}: expected a problem with both sides, found none")
    if (test.scope, test.cache) not in suite.measures:
        measured = ", ".join(" ".join(each) for each in suite.measures)
        key = "scope" if test.scope != "kernel" else "cache"
        expected = f"what {suite.name} measures ({measured})"
        raise SuiteError(f"{where(key)}: {key}: expected {expected}; found {getattr(test, key)}")
    if test.metric == "energy_saved" and not measure.energy:
        expected = "energy: true in measure, for a metric of energy"
        raise SuiteError(f"{where('metric')}: metric: expected {expected}; found energy: false")
    return replace(part, contests=tuple(kept))


def _those(chosen: Chosen, contest: Contest) -> list[Contender]:
    """Return the contenders of a contest that are chosen."""
    return [
        each
        for each in contest.contenders
        if matches(chosen, {"format": each.format, "kernel": each.kernel, "options": each.options})
    ]


@contextmanager
def _placed(where: str) -> Iterator[None]:
    """Put a place in front of what goes wrong inside."""
    try:
        yield
    except SuiteError as error:
        raise SuiteError(f"{where}: measure: {error}") from error
