"""One problem, all its contenders: from bits to rows, in one process.

    operands from the seed, on the device
    each contender: convert ─> prepare ─> activations redrawn in place ─> run on poisoned output
                    ─> held against the definition in fp64 ─> many calls looked at (spots.py)
    the correct ones timed together, once for each scope and cache state (timing.py), with calls
    among the samples looked at, held against the device's ceilings (results/ceilings.py), then
    redrawn, run on what the last draw left in the output, and held again
    after each step: operands and harness are what they were (guard.py, seal.py)

Numbers of draws come from the operating system when they are needed: no kernel knows them before.
The row has them. harness/TRUST.md says what all this does not find.

A case is a row for each scope and cache state. What cannot run is a row with its reason. After a
CUDA error nothing more can be trusted: Fatal.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from sparsebench.harness.bench import operands
from sparsebench.harness.bench.check import Expected, check, roundings, where_stored
from sparsebench.harness.bench.energy import energy
from sparsebench.harness.bench.entry import (
    Announce,
    ContestOptions,
    Entry,
    Explain,
    Fatal,
    RunningContest,
    bound,
    one_line,
    synchronize,
    unexplained,
)
from sparsebench.harness.bench.guard import Guard, Meddled
from sparsebench.harness.bench.prepare import prepare, unsupported
from sparsebench.harness.bench.samples import possible
from sparsebench.harness.bench.seal import Seal
from sparsebench.harness.bench.spots import A, B, Spots, print_of, values_of
from sparsebench.harness.bench.timing import Samples, Timed, ready, time_together
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
    explain: Explain = unexplained,
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
        contest = start(problem, entries, device, data, options, announce, explain)
    except (torch.OutOfMemoryError, MemoryError) as error:
        for entry in entries:
            entry.end(Status.OUT_OF_MEMORY, f"operands: {one_line(error)}")
        return [row for entry in entries for row in entry.rows(measures)], {}
    try:
        for measure in measures:
            _time(contest, *measure)
        if options.energy:
            _energy(contest)
        _check_all(contest, "after timing")
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
    explain: Explain = unexplained,
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
    contest = RunningContest(
        problem, op, device, options, dense, entries, announce, guard, seal, spots, explain
    )
    _watch(contest, data)
    synchronize(device)
    contest.spent_s["operands"] = time.perf_counter() - began
    seed = f"{problem.id} {options.replicate} {options.attempt} prepare"
    shuffled = random.Random(seed).sample(entries, len(entries))
    for entry in sorted(shuffled, key=lambda entry: entry.row.case.contender.twin):
        prepare(contest, entry)
    contest.packed.clear()
    _check_all(contest, "before timing")
    _redraw(contest)
    spots.keep(A)
    for number, entry in enumerate(entries):
        if entry.running:
            with contest.at(entry, "capture"):
                assert entry.launch is not None
                entry.timed = ready(entry.launch, device)
        if entry.timed:
            with contest.at(entry, "check"):
                for call in _calls(contest, entry, entry.timed):
                    spots.burst(number, call, partial(synchronize, device))
                contest.inspect()
                _end_if_wrong(entry, spots.judged(number), "before timing")
    return contest


def _watch(contest: RunningContest, data: Path | None) -> None:
    """Watch the operands that the definition takes, and what they are drawn from."""
    dense, about = contest.dense, (contest.problem, contest.op, contest.device, data)
    named = {
        f"the operand {name}": tensor
        for name, tensor in {**dense.weights, **dense.activations}.items()
    }
    named |= {f"the recording {name}": tensor for name, tensor in dense.recorded.items()}
    contest.guard.watch(named, lambda: operands.rewrite(*about, dense, contest.draw))


def _redraw(contest: RunningContest) -> None:
    """Draw the activations anew, by a number that nobody has seen, and tell it to the rows."""
    contest.draw = int.from_bytes(os.urandom(4), "little") >> 1
    dense = contest.dense
    operands.redraw(contest.problem, contest.op, dense.activations, contest.draw, dense.recorded)
    contest.guard.renew({f"the operand {name}" for name in dense.activations})
    for entry in contest.entries:
        if entry.running:
            entry.row = replace(entry.row, draws=(*entry.row.draws, contest.draw))


def _calls(contest: RunningContest, entry: Entry, timed: Timed) -> list[Callable[[], Output]]:
    """Return what is called in the scopes that are timed: a captured graph, or the launch."""
    scopes = {scope for scope, _ in contest.options.measures}
    clocks = [_as_called(entry, timed) if scope == "op" else timed for scope in sorted(scopes)]
    return list({id(clock.call): clock.call for clock in clocks}.values())


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


def _check_all(contest: RunningContest, when: str) -> None:
    """Redraw the activations, then run every contender and judge it: first on poisoned output."""
    running = [(number, entry) for number, entry in enumerate(contest.entries) if entry.running]
    first = when == "before timing"
    if not running:
        return
    contest.announce("", "reference")
    with contest.stage("check"):
        _redraw(contest)
        if first:
            contest.spots.keep(B)
        expected = _expected(contest)
        pattern = contest.op.pattern
        size = contest.dense.nnz[pattern] if pattern else expected.reference.numel()
        contest.output_bytes = size * expected.dtype.itemsize
    for number, entry in running:
        with contest.at(entry, "check"):
            call = entry.timed.call if entry.timed else entry.launch
            assert call is not None
            if first:
                _poison(call(), contest.guard)
            out = call()
            contest.inspect()
            _own(out, contest.guard)
            allowed = (entry.row.case.contender.error or {}).get("at_most")
            verdict = check(out, replace(expected, allowed=allowed), entry.pattern)
            found = {name: value for name, value in vars(verdict).items() if name != "reason"}
            entry.row = replace(entry.row, **found)
            for measure, row in entry.measured.items():
                entry.measured[measure] = replace(row, **found, draws=entry.row.draws)
            reason = _lost(entry) or verdict.reason
            if reason:
                entry.end(Status.WRONG, f"{when}: {reason}")
            elif first:
                reference = where_stored(expected, entry.pattern).reference
                if seen := print_of(reference, out):
                    contest.spots.prints[B][number] = seen


def _lost(entry: Entry) -> str | None:
    """Say how many values the last call left out, or None."""
    assert entry.launch is not None
    count = entry.launch.lost() if entry.launch.lost else 0
    return f"{count} values lost: the format had no room for them" if count else None


def _expected(contest: RunningContest) -> Expected:
    dense = {**contest.dense.weights, **contest.dense.activations}
    arguments = {name: dense[name].double() for name in contest.op.arguments}
    depth = contest.op.depth(**arguments)
    reference = bound(contest.op.definition, contest.problem)(**arguments)
    spread = bound(contest.op.spread, contest.problem)(**arguments)
    dtype = contest.problem["dtype"]
    allowed = roundings(dtype, contest.op.rounds(dtype))
    parts = contest.op.parts(contest.problem)
    plain = bound(contest.op.definition, contest.problem)(
        **{name: dense[name] for name in contest.op.arguments}
    )
    return Expected(reference, spread, OUTPUTS[dtype], depth, *allowed, parts, plain)


def _poison(out: Output, guard: Guard) -> None:
    """Fill an output with NaN and let go of it: in the next one every element must be new.

    A launch with an output of its own writes over the NaN. One that allocates is likely to be
    given the same memory again.
    """
    elements = _own(out, guard)
    if elements is not None:
        elements.fill_(float("nan"))


def _own(out: Output, guard: Guard) -> Tensor | None:
    """Return the elements of an output, which lie in no operand: Meddled where they do."""
    elements = values_of(out)
    if type(elements) is not Tensor:
        return None  # check says what it is
    guard.refuse(elements)
    return elements


def _time(contest: RunningContest, scope: str, cache: str) -> None:
    """Time the correct contenders together; each gets a row for this scope and cache state."""
    running = [number for number, entry in enumerate(contest.entries) if entry.timed]
    if not running:
        return
    timed = [(contest.entries[n], cast(Timed, contest.entries[n].timed)) for n in running]
    clocks = [_as_called(entry, ready) if scope == "op" else ready for entry, ready in timed]
    contest.announce("", "timing")
    announce = _announcer(contest, running) if contest.options.careful else None
    spots = contest.spots.of(running)
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
    for (entry, _), clock, taken in zip(timed, clocks, samples, strict=True):
        row = replace(entry.row, scope=scope, cache=cache, clock=clock.clock, detail=clock.why)
        entry.measured[scope, cache] = _held_to_light(contest, row, taken)
    for i, (entry, _) in enumerate(timed):
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


def _as_called(entry: Entry, timed: Timed) -> Timed:
    """Return the launch itself, as Python calls it, where a captured graph was to be timed."""
    assert entry.launch is not None
    return timed if timed.clock == "host" else Timed(entry.launch.run, "events")


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
