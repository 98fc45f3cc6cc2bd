"""One problem, all its contenders: from bits to rows, in one process.

    operands from the seed, on the device
    each contender: convert ─> prepare ─> activations redrawn in place ─> run on poisoned output
                    ─> held against the definition in fp64
    the correct ones timed together, once for each scope and cache state (timing.py), held against
    the device's ceilings (ceilings.py), then redrawn, poisoned, run and held again

A case is a row for each scope and cache state. What cannot run is a row with its reason. After a
CUDA error nothing more can be trusted: Fatal.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor

from sparsebench.formats._format import Format, FormatError
from sparsebench.harness import operands
from sparsebench.harness.catalog import keywords, load_format, load_kernel, load_op
from sparsebench.harness.ceilings import LIGHT, Ceilings
from sparsebench.harness.check import Expected, check
from sparsebench.harness.device import identity
from sparsebench.harness.energy import energy
from sparsebench.harness.ops._op import Op
from sparsebench.harness.timing import Measure, Samples, Timed, possible, ready, time_together
from sparsebench.kernels._kernel import DTYPES, Launch, Operands, Output, Unsupported
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


@dataclass(frozen=True)
class Order:
    """How a contest is to be run.

    measures  what is timed, each giving a row
    settled   by case id, what an earlier process's kernel settled on: no second search
    ceilings  of the device, where they are known
    energy    also measure the energy of a call, which takes seconds
    """

    replicate: int = 0
    attempt: int = 0
    reference: bool = False
    measures: tuple[Measure, ...] = (("kernel", "cold"),)
    settled: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    energy: bool = False

    @property
    def careful(self) -> bool:
        """Wait for and announce every sample: an attempt before this one was lost."""
        return self.attempt > 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what a runner sends."""
        ceilings = data["ceilings"] and Ceilings.from_json(data["ceilings"])
        measures = tuple((scope, cache) for scope, cache in data["measures"])
        return cls(**{**data, "ceilings": ceilings, "measures": measures})


@dataclass
class Entry:
    """A contender on its way through the contest; `row` ends up on disk, once a measure."""

    row: Row
    pattern: Format | None = None  # what the output is to be packed like, where it is not dense
    launch: Launch | None = None
    timed: Timed | None = None
    measured: dict[Measure, Row] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Say whether nothing has gone wrong yet."""
        return self.row.status is Status.OK

    def end(self, status: Status, detail: str) -> None:
        """Record how the contender ended, and let go of what it holds."""
        self.row = replace(self.row, status=status, detail=detail)
        self.launch = self.timed = None
        self.measured.clear()

    def rows(self, measures: tuple[Measure, ...]) -> list[Row]:
        """Return a row for each measure; what was not measured says so by its status."""
        blank = {(s, c): replace(self.row, scope=s, cache=c) for s, c in measures}
        return [self.measured.get(measure, row) for measure, row in blank.items()]


@dataclass
class Contest:
    """A problem being measured. `spent_s` is where the time went, by stage."""

    problem: Problem
    op: Op
    device: torch.device
    order: Order
    dense: operands.DenseOperands
    entries: list[Entry]
    announce: Announce
    output_bytes: int = 0
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
    order: Order | None = None,
    announce: Announce = lambda case, stage: None,
) -> tuple[list[Row], dict[str, float]]:
    """Return the rows of every contender, and the seconds spent by stage."""
    order = order or Order()
    measures = possible(order.measures, device.type)
    entries = [Entry(Row(Case(problem, c), Status.OK, **_asked(order, device))) for c in contenders]
    try:
        contest = start(problem, entries, device, data, order, announce)
    except (torch.OutOfMemoryError, MemoryError) as error:
        for entry in entries:
            entry.end(Status.OUT_OF_MEMORY, f"operands: {_one_line(error)}")
        return [row for entry in entries for row in entry.rows(measures)], {}
    for measure in measures:
        _time(contest, *measure)
    if order.energy:
        _energy(contest)
    _check_all(contest, draw=2)
    return [row for entry in entries for row in entry.rows(measures)], contest.spent_s


def start(
    problem: Problem,
    entries: list[Entry],
    device: torch.device,
    data: Path | None,
    order: Order,
    announce: Announce,
) -> Contest:
    """Build the operands, and prepare, check and capture every contender: ready to be timed."""
    began = time.perf_counter()
    op = load_op(problem.op)
    announce("", "operands")
    dense = operands.operands(problem, op, device, data)
    facts = _facts(problem, op, dense)
    for entry in entries:
        entry.row = replace(entry.row, **facts)
    contest = Contest(problem, op, device, order, dense, entries, announce)
    synchronize(device)
    contest.spent_s["operands"] = time.perf_counter() - began
    seed = f"{problem.id} {order.replicate} {order.attempt} prepare"
    shuffled = random.Random(seed).sample(entries, len(entries))
    for entry in sorted(shuffled, key=lambda entry: entry.row.case.contender.twin):
        _prepare(contest, entry)
    contest.packed.clear()
    _check_all(contest, draw=1)
    for entry in entries:
        if entry.running:
            with contest.at(entry, "capture"):
                assert entry.launch is not None
                entry.timed = ready(entry.launch, device)
    return contest


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that an error surfaces where it was made."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _asked(order: Order, device: torch.device) -> dict[str, Any]:
    """Return what all rows of a contest share before anything is built."""
    same = {name: getattr(order, name) for name in ("replicate", "attempt", "reference")}
    return same | {"device": identity(device)}


def _facts(problem: Problem, op: Op, dense: operands.DenseOperands) -> dict[str, Any]:
    """Return what all rows of the problem share."""
    itemsize = DTYPES[problem["dtype"]].itemsize
    full = {name: weight.numel() for name, weight in dense.weights.items()}
    return {
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
        weights, entry.pattern = _split(contest, contender, weights)
    if not entry.running:
        return
    with contest.at(entry, "prepare"), _memory(contest.device) as memory:
        began = time.perf_counter()
        definition = _bound(contest.op.definition, contest.problem)
        settled = _settled(contest, entry)
        activations, pattern = contest.dense.activations, entry.pattern
        given = Operands(contest.problem, weights, activations, definition, settled, pattern)
        entry.launch = kernel.prepare(given, **contender.options)
        entry.launch()
        synchronize(contest.device)
        spent = time.perf_counter() - began
        choice, code = dict(entry.launch.choice), entry.launch.code
        entry.row = replace(entry.row, prepare_s=spent, choice=choice, code=code)
    held, peak = memory.held_bytes, memory.peak_bytes
    entry.row = replace(entry.row, held_bytes=held, peak_bytes=peak)


def _split(
    contest: Contest, contender: Contender, packed: Mapping[str, Format]
) -> tuple[dict[str, Format], Format | None]:
    """Return the weights, and apart from them what a sparse output is to be packed like."""
    weights = {name: w for name, w in packed.items() if name != contest.op.pattern}
    pattern = packed[contest.op.pattern] if contest.op.pattern else None
    return weights, None if contender.format == "dense" else pattern


def _settled(contest: Contest, entry: Entry) -> Mapping[str, Any] | None:
    """Return what an earlier process settled on; a twin does what its original does."""
    case = entry.row.case
    originals = {e.row.case.id: e.row.choice for e in contest.entries if e.row.choice}
    original = Case(case.problem, replace(case.contender, twin=False)).id
    known = contest.order.settled.get(case.id)
    return known or (originals.get(original) if case.contender.twin else None)


@dataclass
class Memory:
    """Device memory beyond what was there before: after a block of code, and at most in it."""

    held_bytes: int | None = None
    peak_bytes: int | None = None


@contextmanager
def _memory(device: torch.device) -> Iterator[Memory]:
    """Measure by torch's allocator; what a library allocates past it is not seen."""
    found = Memory()
    if device.type != "cuda":
        yield found
        return
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield found
    found.held_bytes = torch.cuda.memory_allocated(device) - before
    found.peak_bytes = torch.cuda.max_memory_allocated(device) - before


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
        pattern = contest.op.pattern
        size = contest.dense.nnz[pattern] if pattern else expected.reference.numel()
        contest.output_bytes = size * expected.dtype.itemsize
    for entry in running:
        with contest.at(entry, "check"):
            call = entry.timed.call if entry.timed else entry.launch
            assert call is not None
            verdict = check(_run_poisoned(call), expected, entry.pattern)
            error, excess = verdict.error, verdict.error_of_bound
            entry.row = replace(entry.row, error=error, error_of_bound=excess)
            if verdict.reason:
                when = "before timing" if draw == 1 else "after timing"
                entry.end(Status.WRONG, f"{when}: {verdict.reason}")


def _expected(contest: Contest) -> Expected:
    dense = {**contest.dense.weights, **contest.dense.activations}
    arguments = {name: dense[name].double() for name in contest.op.arguments}
    depth = contest.op.depth(**arguments)
    reference = _bound(contest.op.definition, contest.problem)(**arguments)
    spread = _bound(contest.op.spread, contest.problem)(**arguments)
    return Expected(reference, spread, DTYPES[contest.problem["dtype"]], depth)


def _bound(function: Callable[..., Tensor], problem: Problem) -> Callable[..., Tensor]:
    """Set the arguments of an op's function that are fields of the problem."""
    return partial(function, **{name: problem[name] for name in keywords(function)})


def _run_poisoned(call: Callable[[], Output]) -> Output:
    """Run once, fill the output with NaN and let go of it, run again: every element must be new.

    A launch with an output of its own writes over the NaN. One that allocates is likely to be
    given the same memory again.
    """
    out = call()
    elements = out.arrays().get("values") if isinstance(out, Format) else out
    if isinstance(elements, Tensor):
        elements.fill_(float("nan"))
    del out, elements
    return call()


def _time(contest: Contest, scope: str, cache: str) -> None:
    """Time the correct contenders together; each gets a row for this scope and cache state."""
    timed = [(entry, entry.timed) for entry in contest.entries if entry.timed]
    if not timed:
        return
    clocks = [_as_called(entry, ready) if scope == "op" else ready for entry, ready in timed]
    cases = [entry.row.case.id for entry, _ in timed]
    contest.announce("", "timing")
    careful = contest.order.careful
    announce = (lambda i: contest.announce(cases[i], "timing")) if careful else None
    seed = f"{contest.problem.id} {contest.order.replicate} {contest.order.attempt}"
    with contest.stage("timing"):
        try:
            samples = time_together(
                clocks, contest.device, seed, announce, scope=scope, cache=cache
            )
        except Exception as error:
            raise Fatal("", f"timing: {_one_line(error)}") from error
    for (entry, _), clock, taken in zip(timed, clocks, samples, strict=True):
        row = replace(entry.row, scope=scope, cache=cache, clock=clock.clock)
        entry.measured[scope, cache] = _held_to_light(contest, row, taken)


def _as_called(entry: Entry, timed: Timed) -> Timed:
    """Return the launch itself, as Python calls it, where a captured graph was to be timed."""
    assert entry.launch is not None
    return timed if timed.clock == "host" else Timed(entry.launch, "events")


def _held_to_light(contest: Contest, row: Row, taken: Samples) -> Row:
    """Put the samples into the row, unless they are faster than the device's ceilings allow.

    On a CPU the ceilings are told but no judge: its cores are shared with everything else.
    """
    ceilings = contest.order.ceilings
    if ceilings is not None:
        dtype, size = contest.problem["dtype"], contest.output_bytes
        flops, fewest_bytes = row.flops or 0.0, row.fewest_bytes or 0
        bound_us, by = ceilings.bound(dtype, flops, fewest_bytes, size, row.cache)
        row = replace(row, bound_us=bound_us, bound_by=by)
        if contest.device.type == "cuda" and median(taken.times_us) < LIGHT * bound_us:
            found = f"{median(taken.times_us):.2f} µs where {by} allows {bound_us:.2f} µs"
            return replace(row, status=Status.FASTER_THAN_LIGHT, detail=found)
    return replace(row, samples_us=taken.times_us, samples_per_block=taken.per_block)


def _energy(contest: Contest) -> None:
    """Measure the energy of a call of each correct contender, one after the other."""
    for entry in contest.entries:
        if entry.timed:
            with contest.at(entry, "energy"):
                used = energy(entry.timed.call, contest.device)
                joule, window_s = used.j_per_call, used.window_s
                for measure, row in entry.measured.items():
                    known = replace(row, energy_j=joule, energy_window_s=window_s)
                    entry.measured[measure] = known


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:400]}"
