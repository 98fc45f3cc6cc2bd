"""What a suite will cost on a GPU that is not here, from rows that were published from it.

    time = R x (start + contests x per contest + rows x per row)
         + first process, and R - 1 later ones:  cases x typical, and each kernel once

A verdict's later processes search anew; those of a look take what was chosen (run/runner.py).
So they are read from runs of FEWEST processes. A kernel without one takes AGAIN of its first time:
what it compiled is kept on disk.

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
from sparsebench.harness.bench.samples import possible
from sparsebench.harness.catalog import load_kernel, load_op
from sparsebench.harness.plan.selection import only, planned
from sparsebench.harness.plan.suite import Contest, Suite
from sparsebench.results import store
from sparsebench.results.environment import device_name
from sparsebench.results.record import Contender, Problem, Status
from sparsebench.results.statistics import FEWEST
from sparsebench.results.store import Run

RUNS_AT_MOST = 64  # of a folder that are read
NEAR = 5
AGAIN = 0.45  # of what kernels took in first processes of verdicts, what they took in later ones
STAGES = "operands", "convert", "prepare", "check", "capture", "timing"  # of a contest


@dataclass(frozen=True)
class Kernel:
    """What a kernel's `prepare` took in one kind of process: once, and (log size, s) by case."""

    once_s: float
    cases: Sequence[tuple[float, float]]

    def case_s(self, size: float) -> float:
        """Return what a case of about this size takes."""
        near = sorted(self.cases, key=lambda case: abs(case[0] - size))[:NEAR]
        return median(took_s for _, took_s in near)


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

    def kernels_s(self, cases: Sequence[tuple[str, float]], known: Mapping[str, Kernel]) -> float:
        """Return what preparing cases, (kernel, log size), takes in one process of a kind."""
        usual = Kernel(
            median(k.once_s for k in known.values()), [c for k in known.values() for c in k.cases]
        )
        once_s = sum(known.get(name, usual).once_s for name in {name for name, _ in cases})
        return once_s + sum(known.get(name, usual).case_s(size) for name, size in cases)


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
    first = _prepare(runs, first=True)
    again = {name: _again(kernel) for name, kernel in first.items()}
    verdicts = [run for run in runs if run.state["flags"]["replicates"] >= FEWEST]
    looks = [run for run in runs if run not in verdicts]
    return Costs(
        names.pop(),
        int(runs[0].environment["gpu"].get("memory_bytes", 0)),
        max(0.0, wall_s - spent_s) / processes,
        [_of_run(run) for run in timed],
        first,
        _prepare(looks, first=False) or again,
        again | _prepare(verdicts, first=False),
    )


def plan_there(
    suite: Suite, there: Costs, condition: str = "", replicates: int = 3
) -> dict[str, Any]:
    """Return counts, an estimate in seconds and in bytes, and which kernels have no rows there."""
    asked = only(suite.contests, condition)
    measures = len(possible(suite.measures, "cuda"))
    process_s, prepared = there.start_s, []
    for contest in planned(suite, "cuda", condition):
        running = [_names(k) for k in contest.contenders if _runs(k, contest)]
        cases = [names[0] if names[0] in there.first else names[1] for names in running]
        size = _log_size(contest.problem)
        contest_s, row_s = there.contest_and_row_s(size)
        process_s += bool(cases) * contest_s + len(cases) * measures * row_s
        prepared += [(name, size) for name in cases]
    later = there.searching if replicates >= FEWEST else there.later
    first_s, later_s = (there.kernels_s(prepared, known) for known in (there.first, later))
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


def _prepare(runs: Iterable[Run], *, first: bool) -> dict[str, Kernel]:
    """Return what each kernel's `prepare` took, in first or in later processes."""
    took: dict[str, list[tuple[float, float]]] = {}
    once: dict[str, list[float]] = {}
    for run in runs:
        own: dict[str, list[float]] = {}
        for row in run.rows:
            if row.prepare_s is not None and (row.replicate == 0) is first:
                for name in _names(row.case.contender):
                    own.setdefault(name, []).append(row.prepare_s)
                    took.setdefault(name, []).append((_log_size(row.case.problem), row.prepare_s))
        for name, times in own.items():
            once.setdefault(name, []).append(max(times) - median(times))
    return {name: Kernel(median(once[name]), cases) for name, cases in took.items()}


def _again(kernel: Kernel) -> Kernel:
    return Kernel(0.0, [(size, AGAIN * took_s) for size, took_s in kernel.cases])


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
