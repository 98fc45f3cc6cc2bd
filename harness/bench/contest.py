"""Check and time all contenders of one problem in one process, and return their rows.

    operands from the seed, on the device
    each contender: convert ─> prepare ─> fresh activations in place ─> run on NaN-filled output
                    ─> compare with the fp64 reference (output_checks.py) ─> spot-check many calls
                    (spot_checks.py)
    in scope chain, 8 layers: repeat these checks for every layer's launch, calling the layers in
    order
    time the correct contenders together, once for each scope and cache state (timing.py), with spot
    checks among the samples; compare with the device's ceilings (results/ceilings.py); refresh the
    activations, rerun without clearing the previous output, and compare again
    after each step: verify that operands and harness are unchanged (tampering.py)

Each seed for new activations comes from the operating system at the time of use, so no kernel can
know it in advance; the row records the seeds. harness/TRUST.md says what the checks cannot catch.

A case produces one row for each scope and cache state. A case that cannot run produces a row with
the reason. After a CUDA error no result can be trusted, so the contest raises Fatal.
"""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sparsebench.errors import SparsebenchError
from sparsebench.harness.bench import operands
from sparsebench.harness.bench.contest_state import (
    NO_MEMORY,
    Announce,
    ContestOptions,
    Entry,
    Fatal,
    OnFailure,
    RunningContest,
    end_status,
    one_line,
    synchronize,
)
from sparsebench.harness.bench.energy import energy
from sparsebench.harness.bench.operands import Layer
from sparsebench.harness.bench.output_checks import check_all, of_layer, redraw
from sparsebench.harness.bench.prepare import prepare, prepare_chain, unsupported
from sparsebench.harness.bench.process_state import rewritten_modules
from sparsebench.harness.bench.sampling import CHAIN, LAYERS, Measure, distinct_measures, layers_of
from sparsebench.harness.bench.spot_checks import A, Outputs, Spots
from sparsebench.harness.bench.tampering import Guard, Seal, TamperingError
from sparsebench.harness.bench.timing import Samples, ready, time_together
from sparsebench.harness.catalog import load_op
from sparsebench.harness.machine.device import identity
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
    on_failure: OnFailure = lambda *failure: None,
) -> tuple[list[Row], dict[str, float]]:
    """Return the rows of every contender, and the seconds spent by stage."""
    options = options or ContestOptions()
    measures, id_ = distinct_measures(options.measures, device.type), identity(device)
    about = options.replicate, options.attempt, options.reference
    entries = [Entry(Row(Case(problem, c), Status.OK, *about, device=id_)) for c in contenders]
    spent_s: dict[str, float] = {}
    reasons = [unsupported(problem, contender, device) for contender in contenders]
    if all(reasons):  # draw no operands that no contender would take
        for entry, reason in zip(entries, reasons, strict=True):
            entry.end(Status.UNSUPPORTED, str(reason))
        return [row for entry in entries for row in entry.rows(measures)], spent_s
    try:
        contest = start(
            prepare_contest(problem, entries, device, data, options, announce, on_failure)
        )
    except (*NO_MEMORY, SparsebenchError) as error:
        status, detail = end_status(error)
        for entry in entries:
            entry.end(status, f"operands: {detail}")
    else:
        _measure(contest, measures)
        spent_s = contest.spent_s
    return [row for entry in entries for row in entry.rows(measures)], spent_s


def _measure(contest: RunningContest, measures: tuple[Measure, ...]) -> None:
    try:
        for measure in measures:
            _time(contest, *measure)
        if contest.options.energy:
            _energy(contest)
        check_all(contest, "after timing")
        if modules := rewritten_modules():
            raise Fatal("", f"a contender rewrote the files of {', '.join(modules[:3])}")
    finally:
        contest.guard.watched.clear()  # breaks a reference cycle that would keep all memory
        with suppress(TamperingError):  # restored for the next contest; no contender is running
            contest.seal.check()


def start(contest: RunningContest) -> RunningContest:
    """Check and capture every contender that was prepared, ready to be timed."""
    check_all(contest, "before timing")
    redraw(contest)
    contest.keep(A)
    for number, entry in enumerate(contest.entries):
        if entry.running:
            with contest.at(entry, "capture"):
                _capture(entry, contest.device)
        if entry.timed_call:
            with contest.at(entry, "check"):
                for call, spots in _calls(contest, entry):
                    spots.burst(number, call, partial(synchronize, contest.device))
                    contest.check_tampering()
                    _end_if_wrong(entry, spots.verdict(number), "before timing")
    return contest


def compile_ahead(problem: Problem, contenders: list[Contender], device: torch.device) -> None:
    """Prepare every contender and drop it: its compiled code stays in the caches on disk."""
    entries = [Entry(Row(Case(problem, contender), Status.OK)) for contender in contenders]
    prepare_contest(problem, entries, device).guard.watched.clear()


def prepare_contest(
    problem: Problem,
    entries: list[Entry],
    device: torch.device,
    data: Path | None = None,
    options: ContestOptions | None = None,
    announce: Announce = lambda case, stage: None,
    on_failure: OnFailure = lambda *failure: None,
) -> RunningContest:
    """Build the operands, and prepare every contender in random order."""
    began, seal = time.perf_counter(), Seal()
    rewritten_modules()  # before any contender runs
    options, op = options or ContestOptions(), load_op(problem.op)
    announce("", "operands")
    dense = operands.operands(problem, op, device, data)
    itemsize = DTYPES[problem["dtype"]].itemsize
    facts: dict[str, Any] = {
        **op.work(problem, dense.nnz),
        "sparsity": dense.sparsity,
        "digest": dense.digest,
        "dense_bytes": itemsize * sum(w.numel() for w in dense.weights.values()),
    }
    layers, chained = [Layer(problem, dense)], CHAIN in dict(options.measures)
    if chained and not op.pattern:
        layers += operands.further_layers(problem, op, device, data, LAYERS - 1)
    for entry in entries:
        entry.row = replace(entry.row, **facts)
        if chained and op.pattern:
            reason = f"chain: expected an op with a dense output, found {problem.op}"
            entry.leave_chain(Status.UNSUPPORTED, reason)
    contest = RunningContest(
        problem=problem,
        op=op,
        device=device,
        options=options,
        entries=entries,
        announce=announce,
        on_failure=on_failure,
        guard=Guard(device),
        seal=seal,
        layers=layers,
        spots=Spots(dense.activations),
        chain_spots=Spots(
            {f"{n}{of_layer(i)}": x for i, lay in enumerate(layers) for n, x in lay.inputs.items()}
        ),
    )
    _watch(contest, data)
    synchronize(device)
    contest.spent_s["operands"] = time.perf_counter() - began
    seed = f"{problem.id} {options.replicate} {options.attempt} prepare"
    shuffled = random.Random(seed).sample(entries, len(entries))
    for entry in sorted(shuffled, key=lambda entry: entry.row.case.contender.twin):
        prepare(contest, entry)
        prepare_chain(contest, entry)
    _exchange_twins(entries, random.Random(f"{seed} twins"))
    contest.conversions.clear()
    return contest


def _exchange_twins(entries: list[Entry], coin: random.Random) -> None:
    """Give each A/A twin the launch of its original, and the reverse, with even odds.

    A twin takes the choice of its original, so it is always prepared later. Without the exchange,
    a cost of the order of allocation would have the same sign in every process.
    """
    by_case = {entry.row.case.id: entry for entry in entries}
    for twin in (entry for entry in entries if entry.row.case.contender.twin):
        original = by_case.get(twin.row.case.original.id)
        if original and coin.random() < 0.5 and _alike(original, twin):
            original.launch, twin.launch = twin.launch, original.launch
            original.chain, twin.chain = twin.chain, original.chain


def _alike(original: Entry, twin: Entry) -> bool:
    """Return whether both run the same machine code, and both or neither have a chain."""
    facts = [
        (entry.running, entry.row.choice, entry.row.code, entry.chain is None)
        for entry in (original, twin)
    ]
    return original.running and facts[0] == facts[1]


def _capture(entry: Entry, device: torch.device) -> None:
    """Make the launch ready to be timed, and its chain, if one CUDA graph can hold it."""
    assert entry.launch is not None
    entry.timed_call = ready(entry.launch, device)
    if entry.chain:
        entry.timed_chain = ready(entry.chain, device)
        if entry.timed_chain.clock == "events":
            entry.leave_chain(Status.UNSUPPORTED, f"chain: {entry.timed_chain.why}")


def _watch(contest: RunningContest, data: Path | None) -> None:
    """Watch the operands of the definition, and the recordings that they are drawn from."""
    for number, layer in enumerate(contest.layers):
        dense = layer.dense
        kinds = {"operand": {**dense.weights, **dense.activations}, "recording": dense.recordings}
        arrays = {
            f"the {kind} {name}{of_layer(number)}": tensor
            for kind, tensors in kinds.items()
            for name, tensor in tensors.items()
        }

        def rewrite(layer: Layer = layer) -> None:
            where = contest.op, contest.device, data, layer.dense, contest.draw
            operands.rewrite(layer.problem, *where)

        contest.guard.watch(arrays, rewrite)


def _calls(contest: RunningContest, entry: Entry) -> list[tuple[Callable[[], Outputs], Spots]]:
    """Return the calls of the scopes that are timed, each once, with their spot checks."""
    scopes = sorted({scope for scope, _ in contest.options.measures})
    timed = [(call, contest.spots_of(scope)) for scope in scopes if (call := entry.call_in(scope))]
    return list({id(timed.call): (timed.call, spots) for timed, spots in timed}.values())


def _end_if_wrong(entry: Entry, wrong: str | None, when: str) -> None:
    if wrong and entry.running:
        entry.end(Status.WRONG, f"{when}: {wrong}")


def _time(contest: RunningContest, scope: str, cache: str) -> None:
    """Time the correct contenders together; each gets a row for this scope and cache state."""
    timed = [
        (number, entry, call)
        for number, entry in enumerate(contest.entries)
        if (call := entry.call_in(scope))
    ]
    if not timed:
        return
    numbers = [number for number, _, _ in timed]
    contest.announce("", "timing")

    def announce(i: int) -> None:
        """Announce each sample, and check a contender after its turn."""
        case = contest.entries[numbers[i]].row.case.id
        if case != contest.timed_last:
            _check_tampering(contest)
            contest.timed_last = case
        contest.announce(case, "timing")

    spots = contest.spots_of(scope).of(numbers)
    seed = f"{contest.problem.id} {contest.options.replicate} {contest.options.attempt}"
    with contest.stage("timing"):
        try:
            samples = time_together(
                [call for _, _, call in timed],
                contest.device,
                seed,
                announce if contest.options.attempt else None,
                scope=scope,
                cache=cache,
                spots=spots,
            )
            _check_tampering(contest)
        except Fatal:
            raise
        except Exception as error:
            raise Fatal("", f"timing: {one_line(error)}") from error
    for (_, entry, call), taken in zip(timed, samples, strict=True):
        row = replace(entry.row, scope=scope, cache=cache, clock=call.clock, detail=call.why)
        entry.results[scope, cache] = _with_samples(contest, row, taken)
    for i, (_, entry, _) in enumerate(timed):
        _end_if_wrong(entry, spots.verdict(i), "among the timed calls")


def _check_tampering(contest: RunningContest) -> None:
    """End the process if something was changed while timing; blame the last announced case."""
    try:
        contest.check_tampering()
    except TamperingError as error:
        raise Fatal(contest.timed_last, f"timing: {error}") from error


def _with_samples(contest: RunningContest, row: Row, taken: Samples) -> Row:
    """Put samples into the row, unless they are faster than the device's ceilings allow.

    A chain's samples are divided into those of one layer, whose operands and outputs are cold like
    all others. On a CPU, ceilings are recorded but do not judge, because its cores are shared with
    other work; there, only a reference raises them.
    """
    taken = taken.per_layer(layers_of(row.scope))
    row = contest.options.bounded(row, contest.output_bytes)
    if contest.options.ceilings and (row.reference or contest.device.type == "cuda"):
        row = check_bound(row, median(taken.times_us))
    if row.status is not Status.OK:
        return row
    times: dict[str, Any] = {"samples_us": taken.times_us, "samples_per_block": taken.per_round}
    return replace(row, **times, late=taken.late)


def _energy(contest: RunningContest) -> None:
    for entry in contest.entries:
        if entry.timed_call:
            with contest.at(entry, "energy"):
                used = energy(entry.timed_call.call, contest.device)
                facts: dict[str, Any] = {
                    "energy_j": used.j_per_call,
                    "energy_window_s": used.window_s,
                }
                for measure, row in entry.results.items():
                    if row.scope != CHAIN:  # the energy is that of a call alone
                        entry.results[measure] = replace(row, **facts)
