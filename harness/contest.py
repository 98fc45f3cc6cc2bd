"""One problem, all its contenders: from bits to rows, in one process.

    operands from the seed, on the device
    each contender: convert ─> prepare ─> activations redrawn in place ─> run on poisoned output
                    ─> held against the definition in fp64
    the correct ones timed together (timing.py), then redrawn, poisoned, run and held again

What cannot run is a row with its reason. After a CUDA error nothing more can be trusted: Fatal.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats._format import Format, FormatError
from sparsebench.harness import operands
from sparsebench.harness.catalog import keywords, load_format, load_kernel, load_op
from sparsebench.harness.check import Expected, check
from sparsebench.harness.device import identity
from sparsebench.harness.ops._op import Op
from sparsebench.harness.timing import Timed, ready, time_together
from sparsebench.kernels._kernel import DTYPES, Launch, Operands, Unsupported
from sparsebench.results.record import Case, Contender, Problem, Row, Status

Announce = Callable[[str, str], None]
"""Called with a case id and a stage before anything of that case runs: if the process dies or
hangs, its parent knows whose fault it was."""


class Fatal(Exception):
    """The device no longer answers; the process must end. Carries the case and the reason."""

    def __init__(self, case: str, detail: str) -> None:
        """Blame a case id, or nobody ("")."""
        super().__init__(detail)
        self.case, self.detail = case, detail


@dataclass
class Entry:
    """A contender on its way through the contest; `row` ends up on disk."""

    row: Row
    launch: Launch | None = None
    timed: Timed | None = None

    @property
    def running(self) -> bool:
        """Say whether nothing has gone wrong yet."""
        return self.row.status is Status.OK

    def end(self, status: Status, detail: str) -> None:
        """Record how the contender ended, and let go of what it holds."""
        self.row = replace(self.row, status=status, detail=detail, samples_us=())
        self.launch = self.timed = None


@dataclass
class Contest:
    """A problem being measured. `spent_s` is where the time went, by stage."""

    problem: Problem
    op: Op
    device: torch.device
    dense: operands.DenseOperands
    entries: list[Entry]
    announce: Announce
    spent_s: dict[str, float] = field(default_factory=dict)
    packed: dict[str, tuple[dict[str, Format], float]] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.spent_s[name] = self.spent_s.get(name, 0.0) + elapsed

    @contextmanager
    def at(self, entry: Entry, stage: str) -> Iterator[None]:
        """Announce the contender, and turn whatever it raises into its row."""
        case = entry.row.case.id
        self.announce(case, stage)
        try:
            with self.stage(stage):
                yield
                synchronize(self.device)
        except (FormatError, Unsupported) as refusal:
            entry.end(Status.UNSUPPORTED, str(refusal))
        except (torch.OutOfMemoryError, MemoryError) as error:
            entry.end(Status.OUT_OF_MEMORY, _one_line(error))
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        except Exception as error:
            try:
                synchronize(self.device)
            except Exception as dead:
                raise Fatal(case, f"{stage}: {_one_line(dead)}") from error
            entry.end(Status.FAILED, f"{stage}: {_one_line(error)}")


def run(
    problem: Problem,
    contenders: list[Contender],
    device: torch.device,
    data: Path | None,
    *,
    replicate: int = 0,
    attempt: int = 0,
    announce: Announce = lambda case, stage: None,
) -> tuple[list[Row], dict[str, float]]:
    """Return a row for every contender, and the seconds spent by stage."""
    start = time.perf_counter()
    op = load_op(problem.op)
    announce("", "operands")
    try:
        dense = operands.operands(problem, op, device, data)
    except (torch.OutOfMemoryError, MemoryError) as error:
        blank = [
            Row(Case(problem, c), Status.OUT_OF_MEMORY, replicate, attempt) for c in contenders
        ]
        return [replace(row, detail=f"operands: {_one_line(error)}") for row in blank], {}
    shared = _facts(problem, op, dense, device) | {"replicate": replicate, "attempt": attempt}
    entries = [Entry(Row(Case(problem, c), Status.OK, **shared)) for c in contenders]
    contest = Contest(problem, op, device, dense, entries, announce)
    synchronize(device)
    contest.spent_s["operands"] = time.perf_counter() - start
    for entry in entries:
        _prepare(contest, entry)
    contest.packed.clear()
    _check_all(contest, draw=1)
    _time(contest)
    _check_all(contest, draw=2)
    return [entry.row for entry in entries], contest.spent_s


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that an error surfaces where it was made."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _facts(
    problem: Problem, op: Op, dense: operands.DenseOperands, device: torch.device
) -> dict[str, Any]:
    """Return what all rows of the problem share."""
    itemsize = DTYPES[problem["dtype"]].itemsize
    full = {name: weight.numel() for name, weight in dense.weights.items()}
    return {
        "device": identity(device),
        "cache": "cold" if device.type == "cuda" else "hot",
        "sparsity": dense.sparsity,
        "nnz": sum(dense.nnz.values()),
        "digest": dense.digest,
        "flops": op.flops(problem, dense.nnz),
        "dense_flops": op.flops(problem, full),
        "fewest_bytes": op.fewest_bytes(problem, dense.nnz, itemsize),
        "dense_bytes": itemsize * sum(full.values()),
    }


def _prepare(contest: Contest, entry: Entry) -> None:
    """Convert, then let the kernel pack, compile and tune."""
    contender = entry.row.case.contender
    with contest.at(entry, "convert"):
        kernel = load_kernel(contender.kernel)
        _refuse(contest, contender)
        weights, convert_us = _convert(contest, contender)
        stored = sum(weight.stored_bytes for weight in weights.values())
        entry.row = replace(entry.row, convert_us=convert_us, stored_bytes=stored)
    if not entry.running:
        return
    with contest.at(entry, "prepare"):
        start = time.perf_counter()
        definition = _bound(contest.op.definition, contest.problem)
        given = Operands(contest.problem, weights, contest.dense.activations, definition)
        entry.launch = kernel.prepare(given, **contender.options)
        entry.launch()
        synchronize(contest.device)
        spent = time.perf_counter() - start
        entry.row = replace(entry.row, prepare_s=spent, choice=dict(entry.launch.choice))


def _refuse(contest: Contest, contender: Contender) -> None:
    """Raise Unsupported where the kernel says, before anything is built, that it cannot run."""
    reason = why_not(contest.problem, contender, contest.device)
    if reason:
        raise Unsupported(reason)


def why_not(problem: Problem, contender: Contender, device: torch.device) -> str | None:
    """Say why a contender cannot run a problem on a device, or None; builds nothing."""
    kernel = load_kernel(contender.kernel)
    if kernel.op not in ("any", problem.op):
        return f"computes {kernel.op}, not {problem.op}"
    if kernel.device not in ("any", device.type):
        return f"runs on {kernel.device}, not on {device.type}"
    return kernel.supports(problem, device)


def _convert(contest: Contest, contender: Contender) -> tuple[dict[str, Format], float]:
    """Return the weights in the contender's format and the µs it took; shared by equal formats."""
    key = f"{contender.format} {sorted(contender.params.items())}"
    if key not in contest.packed:
        store = load_format(contender.format).from_dense
        weights: dict[str, Format] = {}
        took_us = []
        for _ in range(2):  # the first call also pays for memory and for loading kernels
            weights.clear()
            synchronize(contest.device)
            start = time.perf_counter()
            for name, dense in contest.dense.weights.items():
                weights[name] = store(dense, **contender.params)
            synchronize(contest.device)
            took_us.append(1e6 * (time.perf_counter() - start))
        contest.packed[key] = weights, min(took_us)
    return contest.packed[key]


def _check_all(contest: Contest, draw: int) -> None:
    """Redraw the activations, then run every contender on poisoned output and judge it."""
    running = [entry for entry in contest.entries if entry.running]
    if not running:
        return
    contest.announce("", "reference")
    with contest.stage("check"):
        operands.redraw(contest.problem, contest.op, contest.dense.activations, draw)
        expected = _expected(contest)
    for entry in running:
        with contest.at(entry, "check"):
            call = entry.timed.call if entry.timed else entry.launch
            assert call is not None
            verdict = check(_run_poisoned(call), expected)
            error, excess = verdict.error, verdict.error_of_bound
            entry.row = replace(entry.row, error=error, error_of_bound=excess)
            if verdict.reason:
                when = "before timing" if draw == 1 else "after timing"
                entry.end(Status.WRONG, f"{when}: {verdict.reason}")


def _expected(contest: Contest) -> Expected:
    arguments: Mapping[str, Tensor] = {
        name: tensor.double()
        for name, tensor in [*contest.dense.weights.items(), *contest.dense.activations.items()]
    }
    depth = max(int((w != 0).sum(1).max()) for w in contest.dense.weights.values())
    reference = _bound(contest.op.definition, contest.problem)(**arguments)
    spread = _bound(contest.op.spread, contest.problem)(**arguments)
    return Expected(reference, spread, DTYPES[contest.problem["dtype"]], depth)


def _bound(function: Callable[..., Tensor], problem: Problem) -> Callable[..., Tensor]:
    """Set the arguments of an op's function that are fields of the problem."""
    return partial(function, **{name: problem[name] for name in keywords(function)})


def _run_poisoned(call: Callable[[], Tensor]) -> Tensor:
    """Run once, fill the output with NaN and let go of it, run again: every element must be new.

    A launch with an output of its own writes over the NaN. One that allocates is likely to be
    given the same memory again.
    """
    out = call()
    if isinstance(out, Tensor):
        out.fill_(float("nan"))
    del out
    return call()


def _time(contest: Contest) -> None:
    """Time the correct contenders together; their samples go into their rows."""
    for entry in contest.entries:
        if entry.running:
            with contest.at(entry, "capture"):
                assert entry.launch is not None
                entry.timed = ready(entry.launch, contest.device)
    timed = [(entry, entry.timed) for entry in contest.entries if entry.timed]
    if not timed:
        return
    cases = [entry.row.case.id for entry, _ in timed]
    attempt, replicate = timed[0][0].row.attempt, timed[0][0].row.replicate
    contest.announce("", "timing")
    careful = (lambda i: contest.announce(cases[i], "timing")) if attempt else None
    seed = f"{contest.problem.id} {replicate} {attempt}"
    with contest.stage("timing"):
        try:
            samples = time_together([t for _, t in timed], contest.device, seed, careful)
        except Exception as error:
            raise Fatal("", f"timing: {_one_line(error)}") from error
    for (entry, launch), taken in zip(timed, samples, strict=True):
        times, per_block = taken.times_us, taken.per_block
        clock = launch.clock
        entry.row = replace(entry.row, clock=clock, samples_us=times, samples_per_block=per_block)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:400]}"
