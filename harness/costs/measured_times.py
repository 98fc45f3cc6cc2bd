"""Times from earlier runs on one GPU; every estimate is based on them.

    run        ceilings, once
    process    startup
    contest    operands, conversion, checks, and everything outside all stages: median over the NEAR
               (5) runs whose problems are closest in size
    row        capture and timing, likewise
    case       `prepare`: median over the same kernel's NEAR cases closest in size
    kernel     once per process, the extra time of its slowest case, such as compilation

`prepare` takes longest in the first process of a run. In later processes it depends on how the run
chooses configurations: some reuse the first process's choice, and verdicts search again among its
finalists. Each dense GEMM is tuned once per process; other contests with the same GEMM search among
its finalists. So the slowest row of a GEMM includes the full search, and its other rows show the
repeat cost.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from sparsebench.errors import ResultError
from sparsebench.harness.catalog import load_op
from sparsebench.results.record import Contender, Problem, Row, Status
from sparsebench.results.run import store
from sparsebench.results.run.provenance import Choices, choices_of, device_name, on_gpu
from sparsebench.results.run.store import Run

MOST_RUNS = 128  # read from a folder
NEAR = 5
FEW = 3  # rows of a run that separate what a kernel takes once from what each case takes
LEAST_CONTEST_S = 0.05
AGAIN = 0.45  # ratio of `prepare` in later and first processes of the published verdicts
KIND = "m", "n", "k", "dtype"
DENSE = "cublas", "cublas_ffn"
CONTEST, ROW = ("operands", "convert", "check"), ("capture", "timing")  # stages in run.json
STAGES = *CONTEST, *ROW, "prepare"
# One energy window, with warm-up and waits for the counter (bench/energy.py): the 42 windows of
# results/published/nvidia-h200/decoder-energy took 113.5 s.
ENERGY_S = 2.7


@dataclass(frozen=True)
class KernelTimes:
    """Times of a kernel's `prepare` in one kind of process, as (log size, seconds) of cases.

    once_s  beyond the usual, for the first case of a process
    again   cases whose dense product the process had met before; empty for other kernels
    """

    once_s: float
    cases: Sequence[tuple[float, float]]
    again: Sequence[tuple[float, float]] = ()

    def case_s(self, size: float, repeated: bool = False) -> float:
        near = sorted((repeated and self.again) or self.cases, key=lambda case: abs(case[0] - size))
        return median(seconds for _, seconds in near[:NEAR])


@dataclass(frozen=True)
class MeasuredTimes:
    """Times measured on one GPU, in seconds.

    sizes      of each run: (mean log size of its problems, s per contest, s per row)
    first      kernels in the first process of a run
    later      kernels in later processes that take the choices of the first one
    searching  kernels in later processes that search among the first one's finalists
    """

    gpu: str
    memory_bytes: int
    ceilings_s: float
    start_s: float
    sizes: Sequence[tuple[float, float, float]]
    first: Mapping[str, KernelTimes]
    later: Mapping[str, KernelTimes]
    searching: Mapping[str, KernelTimes]

    def contest_and_row_s(self, size: float) -> tuple[float, float]:
        near = sorted(self.sizes, key=lambda run: abs(run[0] - size))[:NEAR]
        return median(run[1] for run in near), median(run[2] for run in near)


# Typical times over the packaged suites on an H200 and on two cores: of the start of a process, of
# a row, of a search with its compilation, and of a search among finalists (harness/NOTES.md).
TYPICAL_S = {"cuda": (3.0, 0.06, 0.3, 0.1), "cpu": (3.0, 0.4, 0, 0), "sim": (3.0, 0.02, 0, 0)}


def typical_times(device: str) -> MeasuredTimes:
    """Return the typical times of a kind of device, for any kernel."""
    start_s, row_s, search_s, again_s = TYPICAL_S[device.partition(":")[0]]
    first, searching = ({"": KernelTimes(0.0, [(0.0, s)])} for s in (search_s, again_s))
    return MeasuredTimes(device, 0, 0.0, start_s, [(0.0, 0.0, row_s)], first, {}, searching)


def times_on(path: Path) -> MeasuredTimes:
    """Read a run, or the runs of one GPU in a folder. Raises ResultError if there are none."""
    folders = [path] if (path / "run.json").exists() else store.runs_in(path)
    runs = [store.read(folder) for folder in folders[:MOST_RUNS]]
    if not runs:
        raise ResultError(f"--gpu {path}: expected a run, or a folder of runs, found none")
    names = sorted({device_name(run.environment) for run in runs})
    if len(names) > 1 or not all(on_gpu(run.environment) for run in runs):
        raise ResultError(f"--gpu {path}: expected runs of one GPU, found {', '.join(names)}")
    for run in runs:
        if not run.state["spent_s"].keys() >= {*STAGES}:  # as in runs of a simulated GPU
            expected = "runs with the seconds of each stage (spent_s)"
            raise ResultError(f"--gpu {run.path}: expected {expected}, found none")
    return times(runs)


def times(runs: Sequence[Run]) -> MeasuredTimes:
    """Return what things took in these runs of one device."""
    spent = [run.state["spent_s"] for run in runs]
    ceilings_s = sum(each.get("ceilings", 0.0) for each in spent)
    starts = [run.state["flags"]["replicates"] * len(run.state.get("shards", "1")) for run in runs]
    chosen = {run.path: choices_of(run.state) for run in runs}

    def kernels(selects: Callable[[Choices, int], bool]) -> dict[str, KernelTimes]:
        return _kernels(runs, lambda run, row: selects(chosen[run.path], row.replicate))

    first = kernels(lambda choice, n: choice not in (Choices.BUNDLE, Choices.EARLIER) and n == 0)
    later = kernels(lambda choice, n: choice in (Choices.FIRST, Choices.BUNDLE) and n > 0)
    searching = kernels(
        lambda choice, n: choice is Choices.EARLIER or (choice is Choices.AMONG and n > 0)
    )
    assumed = {  # judging by first processes alone
        name: KernelTimes(0.0, kernel.again or [(size, AGAIN * s) for size, s in kernel.cases])
        for name, kernel in first.items()
    }
    return MeasuredTimes(
        gpu=device_name(runs[0].environment),
        memory_bytes=int((runs[0].environment.get("gpu") or {}).get("memory_bytes", 0)),
        ceilings_s=ceilings_s / len(runs),
        start_s=sum(each["start"] for each in spent) / sum(starts),
        sizes=[_sizes(run) for run in runs],
        first=first,
        later=assumed | later,
        searching=assumed | searching,
    )


def _sizes(run: Run) -> tuple[float, float, float]:
    spent = run.state["spent_s"]
    problems = {row.case.problem.id: row.case.problem for row in run.rows}.values()
    contests = max(1, run.state["contests"]["done"])
    rows = max(1, sum(row.status is Status.OK for row in (*run.rows, *run.reference)))
    elsewhere_s = max(0.0, run.state["seconds"] - sum(spent.values()))
    contest_s = (sum(spent.get(stage, 0.0) for stage in CONTEST) + elsewhere_s) / contests
    row_s = sum(spent.get(stage, 0.0) for stage in ROW) / rows
    return fmean(map(log_size, problems)), max(LEAST_CONTEST_S, contest_s), row_s


def _kernels(runs: Iterable[Run], selects: Callable[[Run, Row], bool]) -> dict[str, KernelTimes]:
    by_name: dict[str, list[list[Row]]] = {}  # rows of each kernel, by run
    for run in runs:
        rows = {(row.case.id, row.replicate): row for row in run.rows if selects(run, row)}
        in_run: dict[str, list[Row]] = {}
        for row in rows.values():
            if row.prepare_s is not None and not row.case.contender.twin:
                for name in names(row.case.contender):
                    in_run.setdefault(name, []).append(row)
        for name, group in in_run.items():
            by_name.setdefault(name, []).append(group)
    return {name: _kernel_times(groups) for name, groups in by_name.items()}


def _kernel_times(groups: Sequence[Sequence[Row]]) -> KernelTimes:
    cases, again = list[tuple[float, float]](), list[tuple[float, float]]()
    once = []
    for rows in groups:
        products: dict[Any, list[tuple[float, float]]] = {}
        for row in rows:
            seconds = row.prepare_s or 0.0
            searched = row.case.contender.kernel in DENSE and row.candidates
            key = (row.replicate, product(row.case.problem)) if searched else id(row)
            products.setdefault(key, []).append((log_size(row.case.problem), seconds))
        for group in products.values():
            dearest = max(group, key=lambda case: case[1])
            cases.append(dearest)
            group.remove(dearest)
            again += group
        if len(products) == len(rows):  # otherwise the dearest row is the search of a product
            for number in {row.replicate for row in rows}:
                each_s = [row.prepare_s or 0.0 for row in rows if row.replicate == number]
                once.append((len(each_s) >= FEW, max(each_s) - median(each_s)))
    enough = [seconds for many, seconds in once if many] or [seconds for _, seconds in once]
    return KernelTimes(median(enough) if enough else 0.0, cases, again)


def names(contender: Contender) -> tuple[str, str]:
    """Return the label with options, and the kernel; times are kept under both."""
    return replace(contender, twin=False).label, contender.kernel


def product(problem: Problem) -> tuple[Any, ...]:
    """Return what problems with the same dense products have in common."""
    return problem.op, *(problem.fields.get(name) for name in KIND)


def log_size(problem: Problem) -> float:
    """Return the logarithm of the multiplications with a problem's first weight, if dense."""
    op = load_op(problem.op)
    first, full = op.weights[0], op.elements(problem)
    if op.mask:
        return log(max(1.0, op.flops(problem, full)))
    return log(max(1, problem["m"] * full[first] * op.copies(problem.fields, first)))
