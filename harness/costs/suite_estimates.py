"""What a suite will cost on a GPU that is not here, from rows that were published from it.

    time = R x (start + contests x per contest + rows x per row)
         + first process, and R - 1 later ones:  cases x typical, and each kernel once

A look's later processes take what was chosen. A verdict's search anew, the long searches among the
finalists of the first process (run/runner.py). What they take is read from verdicts in which they
did. Rows of older runs tell it, too:

    DENSE     a product is searched once in a process, and met again is searched among finalists:
              the dearest row of a kind is the search, and the others are what it takes again
    NARROW    later rows of verdicts that searched everything, by the share of finalists
    others    later rows of verdicts; a kernel without one takes AGAIN of its first time, since what
              it compiled is kept on disk, and what any later process took once

Where rows of a kernel tell what was timed (Row.candidates), those that do not are of older code.

`start` is what a process takes beside its contests. `per contest` is operands, conversion and
checks; `per row` is timing: of the NEAR runs with problems of the nearest size. `typical` is the
median `prepare_s` of the NEAR problems of the nearest size, and `once` what the first case of a
kernel takes beyond that: compiling and loading. A kernel without rows costs what most kernels do.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, prod
from pathlib import Path
from statistics import fmean, median
from typing import Any

from sparsebench.errors import ResultError
from sparsebench.harness.bench.sampling import possible
from sparsebench.harness.catalog import load_kernel, load_op
from sparsebench.harness.plan.selection import only, planned
from sparsebench.harness.plan.suite import Contest, Suite
from sparsebench.kernels._common.search import FINALISTS, finalists
from sparsebench.results import store
from sparsebench.results.provenance import Choices, choices_of, device_name
from sparsebench.results.record import Contender, Problem, Row, Status
from sparsebench.results.statistics import FEWEST
from sparsebench.results.store import Run

RUNS_AT_MOST = 64  # of a folder that are read
NEAR = 5
KIND = "m", "n", "k", "dtype"
DENSE = ("cublas",)
NARROW = "torch_bsr", "torch_bsr_dgrad", "cusparselt", "cusparselt_hybrid"
TIMED = FINALISTS + 1  # lines of a search among finalists: the default is one more
FEW = 3  # rows of a run that tell what is once in a process apart from what is of a case
AGAIN = 0.45  # of what kernels took in first processes of verdicts, what they took in later ones
STAGES = "operands", "convert", "prepare", "check", "capture", "timing"  # of a contest


@dataclass(frozen=True)
class Kernel:
    """What a kernel's `prepare` took in one kind of process: once, and (log size, s) by case.

    again  of products that the process had met before; empty where that makes no difference
    """

    once_s: float
    cases: Sequence[tuple[float, float]]
    again: Sequence[tuple[float, float]] = ()

    def case_s(self, size: float, met: bool = False) -> float:
        """Return what a case of about this size takes; `met`: not the first of its product."""
        cases = (met and self.again) or self.cases
        near = sorted(cases, key=lambda case: abs(case[0] - size))[:NEAR]
        return median(took_s for _, took_s in near)


@dataclass(frozen=True)
class Asked:
    """A case that is to be prepared: its kernel, the log size, and whether its product was met."""

    kernel: str
    size: float
    met: bool


@dataclass(frozen=True)
class Costs:
    """What things took on one GPU, in seconds.

    runs   (mean log size of problems, s a contest, s a row) of each run
    first  kernels in the first process of a run
    later  in the others of a look; searching: in those of a verdict
    """

    gpu: str
    memory_bytes: int
    start_s: float
    runs: Sequence[tuple[float, float, float]]
    first: Mapping[str, Kernel]
    later: Mapping[str, Kernel]
    searching: Mapping[str, Kernel]

    def contest_and_row_s(self, size: float) -> tuple[float, float]:
        """Return what a contest of about this size takes, and a row of it."""
        near = sorted(self.runs, key=lambda run: abs(run[0] - size))[:NEAR]
        return median(run[1] for run in near), median(run[2] for run in near)

    def kernels_s(self, cases: Sequence[Asked], known: Mapping[str, Kernel]) -> float:
        """Return what preparing cases takes in one process of a kind."""
        usual = Kernel(
            median(k.once_s for k in known.values()), [c for k in known.values() for c in k.cases]
        )
        once_s = sum(known.get(name, usual).once_s for name in {case.kernel for case in cases})
        each_s = (known.get(case.kernel, usual).case_s(case.size, case.met) for case in cases)
        return once_s + sum(each_s)


def costs(path: Path) -> Costs:
    """Read a run, or all runs of one GPU in a folder; ResultError says what is not there."""
    folders = [path] if (path / "run.json").exists() else sorted(
        file.parent for file in path.glob("*/run.json")
    )  # fmt: skip
    runs = [store.read(folder) for folder in folders[:RUNS_AT_MOST]]
    if not runs:
        raise ResultError(f"--gpu {path}: expected a run, or a folder of runs, found none")
    names = {device_name(run.environment) for run in runs}
    if len(names) > 1:
        raise ResultError(f"--gpu {path}: expected runs of one GPU, found {', '.join(names)}")
    if not all(run.environment.get("gpu") for run in runs):
        raise ResultError(f"--gpu {path}: expected runs of a GPU, found {', '.join(names)}")
    spent_s = sum(run.state["spent_s"].get(stage, 0.0) for run in runs for stage in STAGES)
    processes = sum(run.state["flags"]["replicates"] for run in runs)
    wall_s = sum(run.state["seconds"] for run in runs)
    timed = [run for run in runs if any(row.status is Status.OK for row in run.rows)]
    if not timed:
        raise ResultError(f"--gpu {path}: expected rows with times, found none")
    for run in timed:  # those of a simulated GPU have none
        if not run.state["spent_s"].keys() >= {*STAGES}:
            expected = "runs with the seconds of each stage (spent_s)"
            raise ResultError(f"--gpu {run.path}: expected {expected}, found none")
    first = _kernels(runs, first=True)
    pinned = [run for run in runs if choices_of(run.state) is Choices.FIRST]
    later = _kernels(pinned, first=False)
    shares = {name: _share(groups) for name, groups in _groups(runs, (True, False)).items()}
    again = {n: _again(n, kernel, later.get(n), shares) for n, kernel in first.items()}
    searched = [run for run in runs if choices_of(run.state) in (Choices.EACH, Choices.AMONG)]
    return Costs(
        names.pop(),
        int(runs[0].environment["gpu"].get("memory_bytes", 0)),
        max(0.0, wall_s - spent_s) / processes,
        [_of_run(run) for run in timed],
        first,
        later or again,
        again | _searching(searched, again),
    )


def plan_there(
    suite: Suite, there: Costs, condition: str = "", replicates: int = 3, *, pinned: bool = False
) -> dict[str, Any]:
    """Return counts, an estimate in seconds and in bytes, and which kernels have no rows there.

    pinned  choices are taken from another run, without a search
    """
    asked = only(suite.contests, condition)
    measures = len(possible(suite.measures, "cuda"))
    process_s, prepared = there.start_s, list[Asked]()
    met = set[tuple[Any, ...]]()
    for contest in planned(suite, "cuda", condition):
        running = [_names(k) for k in contest.contenders if _runs(k, contest) and not k.twin]
        cases = [names[0] if names[0] in there.first else names[1] for names in running]
        size = _log_size(contest.problem)
        contest_s, row_s = there.contest_and_row_s(size)
        rows = sum(_runs(k, contest) for k in contest.contenders) * measures
        process_s += bool(cases) * contest_s + rows * row_s
        kind = kind_of(contest.problem)
        prepared += [Asked(name, size, (name, kind) in met) for name in cases]
        met |= {(name, kind) for name in cases}
    later = there.searching if replicates >= FEWEST and not pinned else there.later
    both = there.later if pinned else there.first, later
    first_s, later_s = (there.kernels_s(prepared, known) for known in both)
    own = Counter(k.kernel for c in asked for k in c.contenders if _runs(k, c))
    return {
        "suite": suite.name,
        "title": suite.title,
        "device": there.gpu,
        "problems": len(asked),
        "cases": sum(len(contest.contenders) for contest in asked),
        "supported": own.total(),
        "replicates": replicates,
        "estimate_s": round(replicates * process_s + first_s + (replicates - 1) * later_s),
        "largest_bytes": max(
            (load_op(c.problem.op).held_bytes(c.problem) for c in asked), default=0
        ),
        "memory_bytes": there.memory_bytes,
        "unknown": sorted(own.keys() - there.first.keys()),
        "unsupported": [],
    }


def _of_run(run: Run) -> tuple[float, float, float]:
    spent = run.state["spent_s"]
    rows = [*run.rows, *run.reference]
    timed = sum(row.status is Status.OK for row in rows)
    problems = {row.case.problem.id: row.case.problem for row in run.rows}.values()
    contest_s = sum(spent[stage] for stage in ("operands", "convert", "check"))
    return (
        fmean(map(_log_size, problems)),
        contest_s / run.state["contests"]["done"],
        (spent["timing"] + spent["capture"]) / timed,
    )


def kind_of(problem: Problem) -> tuple[Any, ...]:
    """Return what problems with the same dense products have in common."""
    return problem.op, *(problem.fields.get(name) for name in KIND)


def _kernels(runs: Iterable[Run], *, first: bool) -> dict[str, Kernel]:
    """Return what each kernel's `prepare` took, in first or in later processes."""
    return {name: _of_runs(groups) for name, groups in _groups(runs, (first,)).items()}


def _groups(runs: Iterable[Run], firsts: Sequence[bool]) -> dict[str, list[list[Row]]]:
    """Return the rows of each kernel by run, a row a case and process; first processes or others.

    Where rows tell what was timed, those that do not are left out.
    """
    found: dict[str, list[list[Row]]] = {}
    for run in runs:
        rows = {(row.case.id, row.replicate): row for row in run.rows if row.prepare_s is not None}
        own: dict[str, list[Row]] = {}
        for row in rows.values():
            if (row.replicate == 0) in firsts and not row.case.contender.twin:
                for name in _names(row.case.contender):
                    own.setdefault(name, []).append(row)
        for name, each in own.items():
            found.setdefault(name, []).append(each)
    told = {name: [g for g in groups if g[0].candidates] for name, groups in found.items()}
    return {name: told[name] or groups for name, groups in found.items()}


def _of_runs(groups: Sequence[Sequence[Row]]) -> Kernel:
    cases, again = list[tuple[float, float]](), list[tuple[float, float]]()
    for rows in groups:
        for of_kind in _kinds(rows):
            dearest = max(of_kind, key=_s)
            cases += [_sized(dearest)]
            again += [_among(row) for row in of_kind if row is not dearest]
    return Kernel(_once_s(groups), cases, again)


def _kinds(rows: Sequence[Row]) -> list[list[Row]]:
    """Return rows of DENSE that tell what was timed by process and product, each other alone."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        searched = row.case.contender.kernel in DENSE and row.candidates
        kind = (row.replicate, kind_of(row.case.problem)) if searched else id(row)
        found.setdefault(kind, []).append(row)
    return [*found.values()]


def _once_s(groups: Sequence[Sequence[Row]]) -> float:
    """Return what the dearest row of a run took beyond the usual; a dense product is searched."""
    enough = [rows for rows in groups if len(rows) >= FEW] or groups
    each = [max(map(_s, rows)) - median(map(_s, rows)) for rows in enough if not _searched(rows)]
    return median(each) if each else 0.0


def _searched(rows: Sequence[Row]) -> bool:
    return len(_kinds(rows)) < len(rows)


def _searching(runs: Sequence[Run], again: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """Return what kernels took in later processes of verdicts, or would take among finalists."""
    among = [run for run in runs if choices_of(run.state) is Choices.AMONG]
    anew = [run for run in runs if run not in among]
    found = {}
    for name, groups in _groups(runs, (True, False)).items():
        if met := _of_runs(groups).again:
            found[name] = Kernel(0.0, met)
    for name, kernel in _kernels(anew, first=False).items():
        if name not in found and _bare(name) not in NARROW:
            found[name] = kernel
    return found | _kernels(among, first=False)


def _again(name: str, first: Kernel, later: Kernel | None, shares: Mapping[str, float]) -> Kernel:
    """Return what a kernel takes in a later process by what it took in first ones."""
    part = AGAIN * (shares.get(_bare(name), 1.0) if _bare(name) in NARROW else 1.0)
    return Kernel(later.once_s if later else 0.0, [(size, part * s) for size, s in first.cases])


def _share(groups: Iterable[Sequence[Row]]) -> float:
    """Return the share of finalists in what a kernel's searches timed."""
    shares = []
    for row in (row for rows in groups for row in rows if row.candidates):
        parts = {line.get("of") for line in row.candidates}
        known = sum(len(finalists(_of(part, row))) for part in parts)
        shares.append(known / sum(line.get("left_out", 1) for line in row.candidates))
    return median(shares) if shares else 1.0


def _of(part: str | None, row: Row) -> list[Mapping[str, Any]]:
    return [line for line in row.candidates if line.get("of") == part]


def _bare(name: str) -> str:
    """Return the kernel of a label, or the kernel that it is."""
    return name.rpartition("/")[2].partition(" ")[0]


def _sized(row: Row) -> tuple[float, float]:
    return _log_size(row.case.problem), _s(row)


def _among(row: Row) -> tuple[float, float]:
    """Return what a search among finalists takes by one of fewer: each line takes as long."""
    lines = Counter(line.get("of") for line in row.candidates)
    size, took_s = _sized(row)
    return size, took_s * max(1.0, TIMED / max(lines.values()))


def _s(row: Row) -> float:
    assert row.prepare_s is not None
    return row.prepare_s


def _names(contender: Contender) -> tuple[str, str]:
    """Return the label, options included, and the kernel: rows are known by both."""
    return replace(contender, twin=False).label, contender.kernel


def _runs(contender: Contender, contest: Contest) -> bool:
    """Say whether a kernel is for a GPU and for this op; more than that is not known from here."""
    kernel = load_kernel(contender.kernel)
    return kernel.device in ("any", "cuda") and kernel.op in ("any", contest.problem.op)


def _log_size(problem: Problem) -> float:
    """Return the logarithm of the multiplications of a problem's first weight, if it is dense."""
    op = load_op(problem.op)
    sizes, first = op.sizes(problem.fields), op.weights[0]
    each = prod(sizes[name] for name in op.operands[first].shape)
    return log(max(1, problem["m"] * each * op.copies(problem.fields, first)))
