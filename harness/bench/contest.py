"""One problem, all its contenders: from bits to rows, in one process.

    operands from the seed, on the device
    each contender: convert ─> prepare ─> activations redrawn in place ─> run on poisoned output
                    ─> held against the definition in fp64
    the correct ones timed together, once for each scope and cache state (timing.py), held against
    the device's ceilings (results/ceilings.py), then redrawn, poisoned, run and held again

A case is a row for each scope and cache state. What cannot run is a row with its reason. After a
CUDA error nothing more can be trusted: Fatal.
"""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.harness.bench import operands
from sparsebench.harness.bench.check import Expected, check, roundings
from sparsebench.harness.bench.energy import energy
from sparsebench.harness.bench.entry import (
    Announce,
    ContestOptions,
    Entry,
    Fatal,
    RunningContest,
    bound,
    one_line,
    synchronize,
)
from sparsebench.harness.bench.prepare import prepare, unsupported
from sparsebench.harness.bench.timing import Samples, Timed, possible, ready, time_together
from sparsebench.harness.catalog import load_op
from sparsebench.harness.machine.device import identity
from sparsebench.harness.ops._op import Op
from sparsebench.kernels._kernel import DTYPES, OUTPUTS, Output
from sparsebench.results.ceilings import judged
from sparsebench.results.record import Case, Contender, Problem, Row, Status


def run(
    problem: Problem,
    contenders: list[Contender],
    device: torch.device,
    data: Path | None,
    options: ContestOptions | None = None,
    announce: Announce = lambda case, stage: None,
) -> tuple[list[Row], dict[str, float]]:
    """Return the rows of every contender, and the seconds spent by stage."""
    options = options or ContestOptions()
    measures = possible(options.measures, device.type)
    entries = [
        Entry(Row(Case(problem, c), Status.OK, **_asked(options, device))) for c in contenders
    ]
    reasons = [unsupported(problem, contender, device) for contender in contenders]
    if all(reasons):  # operands that nobody takes are not drawn
        for entry, reason in zip(entries, reasons, strict=True):
            entry.end(Status.UNSUPPORTED, str(reason))
        return [row for entry in entries for row in entry.rows(measures)], {}
    try:
        contest = start(problem, entries, device, data, options, announce)
    except (torch.OutOfMemoryError, MemoryError) as error:
        for entry in entries:
            entry.end(Status.OUT_OF_MEMORY, f"operands: {one_line(error)}")
        return [row for entry in entries for row in entry.rows(measures)], {}
    for measure in measures:
        _time(contest, *measure)
    if options.energy:
        _energy(contest)
    _check_all(contest, draw=2)
    return [row for entry in entries for row in entry.rows(measures)], contest.spent_s


def start(
    problem: Problem,
    entries: list[Entry],
    device: torch.device,
    data: Path | None,
    options: ContestOptions,
    announce: Announce,
) -> RunningContest:
    """Build the operands, and prepare, check and capture every contender: ready to be timed."""
    began = time.perf_counter()
    op = load_op(problem.op)
    announce("", "operands")
    dense = operands.operands(problem, op, device, data)
    facts = _facts(problem, op, dense)
    for entry in entries:
        entry.row = replace(entry.row, **facts)
    contest = RunningContest(problem, op, device, options, dense, entries, announce)
    synchronize(device)
    contest.spent_s["operands"] = time.perf_counter() - began
    seed = f"{problem.id} {options.replicate} {options.attempt} prepare"
    shuffled = random.Random(seed).sample(entries, len(entries))
    for entry in sorted(shuffled, key=lambda entry: entry.row.case.contender.twin):
        prepare(contest, entry)
    contest.packed.clear()
    _check_all(contest, draw=1)
    for entry in entries:
        if entry.running:
            with contest.at(entry, "capture"):
                assert entry.launch is not None
                entry.timed = ready(entry.launch, device)
    return contest


def _asked(options: ContestOptions, device: torch.device) -> dict[str, Any]:
    """Return what all rows of a contest share before anything is built."""
    same = {name: getattr(options, name) for name in ("replicate", "attempt", "reference")}
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
        "dense_flops": op.flops(op.dense(problem), full),
        "fewest_bytes": op.fewest_bytes(problem, dense.nnz, itemsize),
        "dense_bytes": itemsize * sum(full.values()),
    }


def _check_all(contest: RunningContest, draw: int) -> None:
    """Redraw the activations, then run every contender on poisoned output and judge it."""
    running = [entry for entry in contest.entries if entry.running]
    if not running:
        return
    contest.announce("", "reference")
    with contest.stage("check"):
        operands.redraw(
            contest.problem, contest.op, contest.dense.activations, draw, contest.dense.recorded
        )
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


def _expected(contest: RunningContest) -> Expected:
    dense = {**contest.dense.weights, **contest.dense.activations}
    arguments = {name: dense[name].double() for name in contest.op.arguments}
    depth = contest.op.depth(**arguments)
    reference = bound(contest.op.definition, contest.problem)(**arguments)
    spread = bound(contest.op.spread, contest.problem)(**arguments)
    dtype = contest.problem["dtype"]
    allowed = roundings(dtype, contest.op.rounds(dtype))
    parts = contest.op.parts(contest.problem)
    return Expected(reference, spread, OUTPUTS[dtype], depth, *allowed, parts)


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


def _time(contest: RunningContest, scope: str, cache: str) -> None:
    """Time the correct contenders together; each gets a row for this scope and cache state."""
    timed = [(entry, entry.timed) for entry in contest.entries if entry.timed]
    if not timed:
        return
    clocks = [_as_called(entry, ready) if scope == "op" else ready for entry, ready in timed]
    cases = [entry.row.case.id for entry, _ in timed]
    contest.announce("", "timing")
    careful = contest.options.careful
    announce = (lambda i: contest.announce(cases[i], "timing")) if careful else None
    seed = f"{contest.problem.id} {contest.options.replicate} {contest.options.attempt}"
    with contest.stage("timing"):
        try:
            samples = time_together(
                clocks, contest.device, seed, announce, scope=scope, cache=cache
            )
        except Exception as error:
            raise Fatal("", f"timing: {one_line(error)}") from error
    for (entry, _), clock, taken in zip(timed, clocks, samples, strict=True):
        row = replace(entry.row, scope=scope, cache=cache, clock=clock.clock, detail=clock.why)
        entry.measured[scope, cache] = _held_to_light(contest, row, taken)


def _as_called(entry: Entry, timed: Timed) -> Timed:
    """Return the launch itself, as Python calls it, where a captured graph was to be timed."""
    assert entry.launch is not None
    return timed if timed.clock == "host" else Timed(entry.launch, "events")


def _held_to_light(contest: RunningContest, row: Row, taken: Samples) -> Row:
    """Put the samples into the row, unless they are faster than the device's ceilings allow.

    On a CPU the ceilings are told but no judge: its cores are shared with everything else. Only a
    reference raises them there as well.
    """
    ceilings = contest.options.ceilings
    if ceilings is not None:
        dtype, size = contest.problem["dtype"], contest.output_bytes
        flops, fewest_bytes = row.flops or 0.0, row.fewest_bytes or 0
        bound_us, by = ceilings.bound(dtype, flops, fewest_bytes, size, row.cache) or (None, None)
        row = replace(row, bound_us=bound_us, bound_by=by)
        if row.reference or contest.device.type == "cuda":
            row = judged(row, median(taken.times_us))
    if row.status is not Status.OK:
        return row
    return replace(row, samples_us=taken.times_us, samples_per_block=taken.per_block)


def _energy(contest: RunningContest) -> None:
    """Measure the energy of a call of each correct contender, one after the other."""
    for entry in contest.entries:
        if entry.timed:
            with contest.at(entry, "energy"):
                used = energy(entry.timed.call, contest.device)
                joule, window_s = used.j_per_call, used.window_s
                for measure, row in entry.measured.items():
                    known = replace(row, energy_j=joule, energy_window_s=window_s)
                    entry.measured[measure] = known
