"""One problem, all its contenders: from bits to rows, in one process.

    operands from the seed, on the device
    each contender: convert ─> prepare ─> activations redrawn in place ─> run on poisoned output
                    ─> held against the definition in fp64 (checking.py) ─> many calls looked at
                    (spots.py)
    in scope chain, 8 layers: the same for the launches of all of them, called in turn
    the correct ones timed together, once for each scope and cache state (timing.py), with calls
    among the samples looked at, held against the device's ceilings (results/ceilings.py), then
    redrawn, run on what the last draw left in the output, and held again
    after each step: operands and harness are what they were (guard.py, seal.py)

Numbers of draws come from the operating system when they are needed: no kernel knows them before.
The row has them. harness/TRUST.md says what all this does not find.

A case is a row for each scope and cache state. What cannot run is a row with its reason. After a
CUDA error nothing more can be trusted: Fatal.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from sparsebench.harness.bench import operands
from sparsebench.harness.bench.contest_state import (
    Announce,
    ContestOptions,
    Entry,
    Fatal,
    OnFailure,
    RunningContest,
    ignore_failure,
    one_line,
    synchronize,
)
from sparsebench.harness.bench.energy import energy
from sparsebench.harness.bench.operands import Layer
from sparsebench.harness.bench.output_checks import check_all, of_layer, redraw
from sparsebench.harness.bench.prepare import follow, prepare, unsupported
from sparsebench.harness.bench.sampling import CHAIN, LAYERS, chained, layers_of, possible
from sparsebench.harness.bench.spot_checks import A, Outputs, Spots
from sparsebench.harness.bench.tampering import Guard, Meddled, Seal
from sparsebench.harness.bench.timing import Samples, ready, time_together
from sparsebench.harness.catalog import load_op
from sparsebench.harness.machine.device import identity
from sparsebench.harness.ops._op import Op
from sparsebench.kernels._kernel import DTYPES
from sparsebench.results.ceilings import check_bound
from sparsebench.results.record import Case, Contender, Problem, Row, Status


def run(
    problem: Problem,
    contenders: list[Contender],
    device: torch.device,
    data: Path | None,
    options: ContestOptions | None = None,
    announce: Announce = lambda case, stage: None,
    on_failure: OnFailure = ignore_failure,
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
        contest = start(problem, entries, device, data, options, announce, on_failure)
    except (torch.OutOfMemoryError, MemoryError) as error:
        for entry in entries:
            entry.end(Status.OUT_OF_MEMORY, f"operands: {one_line(error)}")
        return [row for entry in entries for row in entry.rows(measures)], {}
    try:
        for measure in measures:
            _time(contest, *measure)
        if options.energy:
            _energy(contest)
        check_all(contest, "after timing")
    finally:
        contest.guard.watched.clear()  # it knows the contest: a cycle would keep all memory
    return [row for entry in entries for row in entry.rows(measures)], contest.spent_s


def start(
    problem: Problem,
    entries: list[Entry],
    device: torch.device,
    data: Path | None,
    options: ContestOptions,
    announce: Announce,
    on_failure: OnFailure = ignore_failure,
) -> RunningContest:
    """Build the operands, and prepare, check and capture every contender: ready to be timed."""
    began = time.perf_counter()
    seal = Seal()
    op = load_op(problem.op)
    announce("", "operands")
    dense = operands.operands(problem, op, device, data)
    facts = _facts(problem, op, dense)
    for entry in entries:
        entry.row = replace(entry.row, **facts)
    guard, spots = Guard(device), Spots(dense.activations)
    layers = [Layer(problem, dense), *_further(problem, op, device, data, entries, options)]
    contest = RunningContest(
        *(problem, op, device, options, dense, entries, announce, guard, seal, spots),
        *(layers, Spots(_activations(layers)), on_failure),
    )
    _watch(contest, data)
    synchronize(device)
    contest.spent_s["operands"] = time.perf_counter() - began
    seed = f"{problem.id} {options.replicate} {options.attempt} prepare"
    shuffled = random.Random(seed).sample(entries, len(entries))
    for entry in sorted(shuffled, key=lambda entry: entry.row.case.contender.twin):
        prepare(contest, entry)
        follow(contest, entry)
    contest.packed.clear()
    check_all(contest, "before timing")
    redraw(contest)
    contest.keep(A)
    for number, entry in enumerate(entries):
        if entry.running:
            with contest.at(entry, "capture"):
                _capture(entry, device)
        if entry.timed:
            with contest.at(entry, "check"):
                for call, spots in _calls(contest, entry):
                    spots.burst(number, call, partial(synchronize, device))
                    contest.inspect()
                    _end_if_wrong(entry, spots.judged(number), "before timing")
    return contest


def _further(
    problem: Problem,
    op: Op,
    device: torch.device,
    data: Path | None,
    entries: Sequence[Entry],
    options: ContestOptions,
) -> list[Layer]:
    """Build the further layers of a chain, where one is to be timed and the op has chains."""
    if not chained(options.measures):
        return []
    if op.pattern:
        reason = f"chain: expected an op with a dense output, found {problem.op}"
        for entry in entries:
            entry.leave_chain(Status.UNSUPPORTED, reason)
        return []
    return operands.further(problem, op, device, data, LAYERS - 1)


def _activations(layers: Sequence[Layer]) -> dict[str, Tensor]:
    """Name the activations of all layers."""
    return {
        f"{name}{of_layer(number)}": x
        for number, layer in enumerate(layers)
        for name, x in layer.dense.activations.items()
    }


def _capture(entry: Entry, device: torch.device) -> None:
    """Make the launch ready to be timed, and its chain: as one graph, or not at all."""
    assert entry.launch is not None
    entry.timed = ready(entry.launch, device)
    if entry.chain:
        entry.chained = ready(entry.chain, device)
        if entry.chained.clock == "events":
            entry.leave_chain(Status.UNSUPPORTED, f"chain: {entry.chained.why}")


def _watch(contest: RunningContest, data: Path | None) -> None:
    """Watch the operands that the definition takes, and what they are drawn from."""
    for number, layer in enumerate(contest.layers):
        dense, where = layer.dense, of_layer(number)
        named = {
            f"the operand {name}{where}": tensor
            for name, tensor in {**dense.weights, **dense.activations}.items()
        }
        named |= {f"the recording {name}{where}": tensor for name, tensor in dense.recorded.items()}
        contest.guard.watch(named, partial(_rewrite, contest, layer, data))


def _rewrite(contest: RunningContest, layer: Layer, data: Path | None) -> None:
    about = layer.problem, contest.op, contest.device, data
    operands.rewrite(*about, layer.dense, contest.draw)


def _calls(contest: RunningContest, entry: Entry) -> list[tuple[Callable[[], Outputs], Spots]]:
    """Return what is called in the scopes that are timed, with the spots that look at it."""
    scopes = sorted({scope for scope, _ in contest.options.measures})
    clocks = [(clock, contest.spots_of(scope)) for scope in scopes if (clock := entry.clock(scope))]
    return list({id(clock.call): (clock.call, spots) for clock, spots in clocks}.values())


def _end_if_wrong(entry: Entry, wrong: str | None, when: str) -> None:
    """End a contender where calls of it were seen to be wrong."""
    if wrong and entry.running:
        entry.end(Status.WRONG, f"{when}: {wrong}")


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


def _time(contest: RunningContest, scope: str, cache: str) -> None:
    """Time the correct contenders together; each gets a row for this scope and cache state."""
    clocked = [(n, entry, entry.clock(scope)) for n, entry in enumerate(contest.entries)]
    timed = [(n, entry, clock) for n, entry, clock in clocked if clock]
    if not timed:
        return
    running, clocks = [n for n, _, _ in timed], [clock for _, _, clock in timed]
    contest.announce("", "timing")
    announce = _announcer(contest, running) if contest.options.careful else None
    spots = contest.spots_of(scope).of(running)
    seed = f"{contest.problem.id} {contest.options.replicate} {contest.options.attempt}"
    with contest.stage("timing"):
        try:
            samples = time_together(
                clocks, contest.device, seed, announce, scope=scope, cache=cache, spots=spots
            )
            _inspect(contest)
        except Fatal:
            raise
        except Exception as error:
            raise Fatal("", f"timing: {one_line(error)}") from error
    for (_, entry, clock), taken in zip(timed, samples, strict=True):
        row = replace(entry.row, scope=scope, cache=cache, clock=clock.clock, detail=clock.why)
        entry.measured[scope, cache] = _held_to_light(contest, row, taken)
    for i, (_, entry, _) in enumerate(timed):
        _end_if_wrong(entry, spots.judged(i), "among the timed calls")


def _announcer(contest: RunningContest, running: Sequence[int]) -> Callable[[int], None]:
    """Return what names each sample; before another contender's, the last one is inspected."""

    def announce(i: int) -> None:
        case = contest.entries[running[i]].row.case.id
        if case != contest.timed_last:
            _inspect(contest)
            contest.timed_last = case
        contest.announce(case, "timing")

    return announce


def _inspect(contest: RunningContest) -> None:
    """Give the contest up where something was changed while timing; blame who is known."""
    try:
        contest.inspect()
    except Meddled as found:
        raise Fatal(contest.timed_last, f"timing: {found}") from found


def _held_to_light(contest: RunningContest, row: Row, taken: Samples) -> Row:
    """Put the samples into the row, unless they are faster than the device's ceilings allow.

    Of a chain they become those of a layer, whose operands and outputs are cold like all others.

    On a CPU the ceilings are told but no judge: its cores are shared with everything else. Only a
    reference raises them there as well.
    """
    ceilings, layers = contest.options.ceilings, layers_of(row.scope)
    taken = taken.of_a_layer(layers)
    if ceilings is not None:
        dtype, size = contest.problem["dtype"], contest.output_bytes
        flops, fewest_bytes = row.flops or 0.0, row.fewest_bytes or 0
        least = ceilings.bound(dtype, flops, fewest_bytes, size, row.cache, layers)
        bound_us, by = least or (None, None)
        row = replace(row, bound_us=bound_us, bound_by=by)
        if row.reference or contest.device.type == "cuda":
            row = check_bound(row, median(taken.times_us))
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
                    if row.scope != CHAIN:  # it is the energy of a call alone
                        known = replace(row, energy_j=joule, energy_window_s=window_s)
                        entry.measured[measure] = known
