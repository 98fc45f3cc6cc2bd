"""What deciding problems will take in one more process, from what the screening took.

process  = start + references + problems
contest  = what any contest takes: operands, checks, timing; and `prepare` of its cases
dense    a product is searched once in a verdict, and then among its finalists (cublas.py): the
         first contest of its kind (op, m, n, k, dtype) takes `once` in the first process, and
         `again` in the others, as the other contests of its kind
others   what `prepare` took, or what it mostly took in rows of the kernel where that is less:
         compiling is in the first row of a kernel, and later processes find its code
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from sparsebench.harness.costs.suite_estimates import kind_of
from sparsebench.results.record import Problem, Row
from sparsebench.results.store import Run

LEAST_S = 0.05  # of a contest
APART = "start", "ceilings"  # stages of run.json that are no contest's

Kind = tuple[Any, ...]


@dataclass(frozen=True)
class Costs:
    """Seconds, by what they are of.

    ceilings, start  of a run, and of a process
    contest          of any contest, without `prepare`
    once, again      of the dense contenders of a kind of problem: at first, and again
    case             of `prepare` of every other case, by its id
    problems         that were screened, by id; `references` are of every process
    """

    ceilings_s: float
    start_s: float
    contest_s: float
    once_s: Mapping[Kind, float]
    again_s: Mapping[Kind, float]
    case_s: Mapping[str, float]
    problems: Mapping[str, Problem]
    references: Sequence[Problem]

    def affordable(
        self, wanted: Mapping[str, Sequence[str]], left_s: float, processes: int
    ) -> dict[str, Sequence[str]]:
        """Return the problems, in their order, that so many processes can measure in that time.

        `wanted` are cases by problem, the most decisive first. One that is too dear is left out,
        and those behind it are asked.
        """
        whole_s, met = left_s - self.ceilings_s, set[Kind]()
        fixed_s = (self._contests_s(p, (), met, processes) for p in self.references)
        spent_s = processes * self.start_s + sum(fixed_s)
        chosen = {}
        for name, cases in wanted.items():
            with_it = set(met)
            took_s = self._contests_s(self.problems[name], cases, with_it, processes)
            if spent_s + took_s <= whole_s:
                spent_s, met, chosen[name] = spent_s + took_s, with_it, cases
        return chosen

    def _contests_s(
        self, problem: Problem, cases: Iterable[str], met: set[Kind], processes: int
    ) -> float:
        """Return what a contest takes in all processes; `met` are kinds before it, and its own."""
        kind = kind_of(problem)
        again_s = self.again_s.get(kind, 0.0)
        search_s = 0.0 if kind in met else self.once_s.get(kind, 0.0) - again_s
        met.add(kind)
        each_s = self.contest_s + again_s + sum(self.case_s.get(case, 0.0) for case in cases)
        return processes * each_s + search_s


def costs(run: Run) -> Costs:
    """Read what a screening took."""
    spent, done = run.state["spent_s"], max(1, run.state["contests"]["done"])
    rows = [*{row.case.id: row for row in (*run.reference, *run.rows)}.values()]
    dense: dict[Kind, dict[str, float]] = {}
    for row in rows:
        if row.case.contender.baseline and row.prepare_s is not None:
            of_kind, name = dense.setdefault(kind_of(row.case.problem), {}), row.case.problem.id
            of_kind[name] = of_kind.get(name, 0.0) + row.prepare_s
    rest_s = run.state["seconds"] - sum(spent.get(stage, 0.0) for stage in (*APART, "prepare"))
    return Costs(
        ceilings_s=spent.get("ceilings", 0.0),
        start_s=spent.get("start", 0.0),
        contest_s=max(LEAST_S, rest_s / done),
        once_s={kind: max(each.values()) for kind, each in dense.items()},
        again_s={kind: min(each.values()) for kind, each in dense.items()},
        case_s=_of_cases(rows),
        problems={row.case.problem.id: row.case.problem for row in run.rows},
        references=[*{row.case.problem.id: row.case.problem for row in run.reference}.values()],
    )


def _of_cases(rows: Sequence[Row]) -> dict[str, float]:
    took: dict[str, list[float]] = {}
    own: dict[str, tuple[str, float]] = {}
    for row in rows:
        if not row.case.contender.baseline and row.prepare_s is not None:
            took.setdefault(row.case.contender.label, []).append(row.prepare_s)
            own[row.case.id] = row.case.contender.label, row.prepare_s
    return {case: min(own_s, median(took[label])) for case, (label, own_s) in own.items()}


def coarse(problems: Iterable[Problem], decided: float) -> dict[str, int]:
    """Rank problems by id: of each shape the level `decided` first, then its least sparse one.

    Ranks add up over blocks in the order of the suite, so that a screening that is cut short has
    looked at every shape.
    """
    shapes: dict[Kind, list[Problem]] = {}
    for problem in problems:
        shapes.setdefault((*kind_of(problem), problem["pattern"]), []).append(problem)
    ranks = {}
    for shape in shapes.values():
        levels = sorted({_level(problem) for problem in shape})
        nearest = min(levels, key=lambda level: abs(level - decided))
        levels = list(dict.fromkeys([nearest, *levels]))
        blocks = list(dict.fromkeys(str(problem["block"]) for problem in shape))
        for problem in shape:
            ranks[problem.id] = levels.index(_level(problem)) + blocks.index(str(problem["block"]))
    return ranks


def _level(problem: Problem) -> float:
    """Return the sparsity, or of units the fraction that is off."""
    active: Any = problem.fields.get("active")
    return float(problem["sparsity"]) if active is None else 1 - float(active) / problem["n"]
