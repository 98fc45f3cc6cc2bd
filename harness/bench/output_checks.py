"""Is what a contender returns right? Its outputs, held against the op's definition in fp64.

    before timing, and after it:
    activations drawn anew, by a number that no kernel has seen
    ─> what each layer should give, by the definition: in fp64, and in the problem's dtype
    ─> each contender is called; before timing its output is NaN before the call
    ─> each output lies in no operand and is as near as its dtype allows (check.py), else wrong
    ─> errors, lost values and draws are told to the contender's rows

A contender with a chain is called once more, for the chain, and each layer is judged.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsebench.harness.bench import operands
from sparsebench.harness.bench.contest_state import Entry, RunningContest, bound, one_line
from sparsebench.harness.bench.correctness import Expected, check, roundings, where_stored
from sparsebench.harness.bench.operands import Layer
from sparsebench.harness.bench.sampling import CHAIN
from sparsebench.harness.bench.spot_checks import B, Outputs, Spots, each, print_of, values_of
from sparsebench.harness.bench.tampering import Guard
from sparsebench.harness.ops._op import Op
from sparsebench.kernels._kernel import OUTPUTS, Launch, Output
from sparsebench.results.record import Status


def check_all(contest: RunningContest, when: str) -> None:
    """Redraw the activations, then run every contender and judge it: first on poisoned output."""
    running = [(number, entry) for number, entry in enumerate(contest.entries) if entry.running]
    first = when == "before timing"
    if not running:
        return
    contest.announce("", "reference")
    with contest.stage("check"):
        redraw(contest)
        if first:
            contest.keep(B)
        expected = _with_room(contest, when)
        if expected is None:
            return
        pattern = contest.op.pattern
        size = contest.dense.nnz[pattern] if pattern else expected[0].reference.numel()
        contest.output_bytes = size * expected[0].dtype.itemsize
    for number, entry in [(number, entry) for number, entry in running if entry.running]:
        with contest.at(entry, "check"):
            assert entry.launch is not None
            call = entry.timed.call if entry.timed else entry.launch
            found = _check(contest, number, call, [entry.launch], expected[:1], contest.spots, when)
            entry.row = replace(entry.row, **found)
            _tell(entry, found)
            if entry.chain and entry.running:
                call = entry.chained.call if entry.chained else entry.chain.run
                launches = entry.chain.launches
                spots = contest.chain_spots
                found = _check(contest, number, call, launches, expected, spots, when)
                _tell(entry, found, CHAIN)


def redraw(contest: RunningContest) -> None:
    """Draw the activations anew, by a number that nobody has seen, and tell it to the rows."""
    recordings = [of for layer in contest.layers for of in layer.dense.recorded.values()]
    contest.draw = operands.unseen(contest.draw, recordings)
    for number, layer in enumerate(contest.layers):
        own = layer.dense
        operands.redraw(
            *(layer.problem, contest.op, own.activations, contest.draw),
            *(own.recorded, own.weights),
        )
        contest.guard.renew({f"the operand {name}{of_layer(number)}" for name in own.activations})
    for entry in contest.entries:
        if entry.running:
            entry.row = replace(entry.row, draws=(*entry.row.draws, contest.draw))


def of_layer(layer: int) -> str:
    """Name a further layer of a chain; the first is the problem itself."""
    return f" of layer {layer}" if layer else ""


def _check(
    contest: RunningContest,
    number: int,
    call: Callable[[], Outputs],
    launches: Sequence[Launch],
    expected: Sequence[Expected],
    spots: Spots,
    when: str,
) -> dict[str, Any]:
    """Run a contender's launch, or its chain, and judge each output; return the largest errors."""
    entry, first = contest.entries[number], when == "before timing"
    if first:
        for out in each(call()):
            _poison(out, contest.guard)
    outputs = call()
    contest.inspect()
    allowed = (entry.row.case.contender.error or {}).get("at_most")
    verdicts = []
    for layer, (out, right) in enumerate(zip(each(outputs), expected, strict=True)):
        _own(out, contest.guard)
        verdict = check(out, replace(right, allowed=allowed), entry.pattern)
        reason = _lost(launches[layer]) or verdict.reason
        if reason and entry.running:
            entry.end(Status.WRONG, f"{when}{of_layer(layer)}: {reason}")
        verdicts.append(verdict)
    if first and entry.running:
        references = [where_stored(right, entry.pattern).reference for right in expected]
        if seen := print_of(references, outputs):
            spots.prints[B][number] = seen
    worst = max(verdicts, key=lambda verdict: verdict.error or 0.0)
    return {name: value for name, value in vars(worst).items() if name != "reason"}


def _tell(entry: Entry, found: Mapping[str, Any], scope: str = "") -> None:
    """Put errors into the rows that were measured: all, or those of a scope."""
    for measure, row in entry.measured.items():
        if scope in ("", measure[0]):
            entry.measured[measure] = replace(row, **found, draws=entry.row.draws)


def _lost(launch: Launch) -> str | None:
    """Say how many values the last call left out, or None."""
    count = launch.lost() if launch.lost else 0
    values = "value" if count == 1 else "values"  # results/formatting.py would load pandas
    return f"{count} {values} lost: the format had no room for them" if count else None


def _with_room(contest: RunningContest, when: str) -> list[Expected] | None:
    """Compute what each layer is expected to give.

    Where memory ends, the twins end, and then everybody: None. Of Qwen3-32B in fp8 the weights of
    all layers, dense and 2:4, are 57 GB, twins 57 more.
    """
    for ends in (lambda entry: entry.row.case.contender.twin, lambda entry: True):
        try:
            return [_expected(contest.op, layer) for layer in contest.layers]
        except (torch.OutOfMemoryError, MemoryError) as error:
            reason = f"reference, {when}: {one_line(error)}"
        for entry in contest.entries:
            if entry.running and ends(entry):
                entry.end(Status.OUT_OF_MEMORY, reason)
        gc.collect()
        if contest.device.type == "cuda":
            torch.cuda.empty_cache()
    return None


def _expected(op: Op, layer: Layer) -> Expected:
    """Compute the right answer; torch's own comes first, when no fp64 is in memory yet."""
    problem, known = layer.problem, {**layer.dense.weights, **layer.dense.activations}
    dense = {name: known[name] for name in op.arguments}
    plain = bound(op.definition, problem)(**dense)
    arguments = {name: operand.double() for name, operand in dense.items()}
    depth = op.depth(**arguments)
    reference = bound(op.definition, problem)(**arguments)
    spread = bound(op.spread, problem)(**arguments)
    dtype = problem["dtype"]
    allowed = roundings(dtype, op.rounds(dtype))
    parts = op.parts(problem)
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
