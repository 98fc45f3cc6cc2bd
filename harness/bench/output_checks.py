"""Check what contenders return against the op's definition in fp64.

    before timing, and after it:
    draw new activations, from a seed that no kernel can know
    ─> compute what each layer should give, by the definition: in fp64, and in the problem's dtype
    ─> call each contender; before timing, its output is filled with NaN, or with the least integer
    ─> no output may lie in an operand, and each must be as near as its dtype allows
       (correctness.py); otherwise the contender is wrong
    ─> errors, lost values and draws go into the contender's rows

A contender with a chain is called once more, for the chain, and each layer's output is judged.

An op may name a random part of a large problem (Op.sample). Its answer suffices after timing, and
before it if an earlier process of the run compared the whole outputs of the same configurations.
The seed of the part comes from the operating system. Then the calls that are inspected while timing
are compared with the first output, as a whole (spot_checks.py).
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from random import SystemRandom
from typing import Any

import torch
from torch import Tensor

from sparsebench.harness.bench import operands
from sparsebench.harness.bench.contest_state import Entry, RunningContest, configuration, one_line
from sparsebench.harness.bench.correctness import Expected, check, roundings, where_stored
from sparsebench.harness.bench.operands import Layer, without_mask
from sparsebench.harness.bench.sampling import CHAIN
from sparsebench.harness.bench.spot_checks import (
    B,
    Outputs,
    Spots,
    as_tuple,
    fingerprint_of,
    values_of,
)
from sparsebench.harness.bench.tampering import Guard
from sparsebench.harness.ops._op import Op, with_fields
from sparsebench.kernels._kernel import OUTPUTS, Launch, Output, poison
from sparsebench.results.record import Status


def check_all(contest: RunningContest, when: str) -> None:
    """Redraw the activations, then run every contender and judge it."""
    running = [(number, entry) for number, entry in enumerate(contest.entries) if entry.running]
    if not running:
        return
    contest.announce("", "reference")
    with contest.stage("check"):
        redraw(contest)
        if when == "before timing":
            contest.keep(B)
        answers = _answers_with_room(contest, when)
        if answers is None or not all(_fit(contest, right) for right in answers.values()):
            return
        pattern, (first, *_) = contest.op.pattern, next(iter(answers.values()))
        size = contest.dense.nnz[pattern] if pattern else prod(first.shape)
        contest.output_bytes = size * first.dtype.itemsize
    watched = {name for whole, right in answers.items() for name in _watch(contest, right, whole)}
    for number, entry in [(number, entry) for number, entry in running if entry.running]:
        with contest.at(entry, "check"):
            assert entry.launch is not None
            call = entry.timed_call.call if entry.timed_call else entry.launch
            expected = answers[_whole(contest, entry)]
            launches, spots = [entry.launch], contest.spots
            errors = _check(contest, number, call, launches, expected[:1], spots, when)
            entry.row = replace(entry.row, **errors)
            _record(entry, errors)
            if entry.chain and entry.running:
                call = entry.timed_chain.call if entry.timed_chain else entry.chain.run
                launches, spots = [*entry.chain.launches], contest.chain_spots
                errors = _check(contest, number, call, launches, expected, spots, when)
                _record(entry, errors, CHAIN)
    contest.guard.forget(watched)


def _in_part(contest: RunningContest, whole: bool, when: str) -> bool:
    """Return whether a part of the answer suffices for the contenders of a kind (`_whole`)."""
    checked = contest.options.checked
    return when != "before timing" or all(
        configuration(entry.row) in checked.get(entry.row.case.id, ())
        for entry in contest.entries
        if entry.running and _whole(contest, entry) == whole
    )


def _whole(contest: RunningContest, entry: Entry) -> bool:
    """Return whether a contender ignores the mask of the op."""
    return contest.op.mask is not None and entry.row.case.contender.format == "dense"


def _watch(contest: RunningContest, expected: Sequence[Expected], whole: bool) -> set[str]:
    """Watch the right answers while contenders run, and return their names."""
    names, of_whole = set[str](), " without the mask" if whole else ""
    for number, (layer, right) in enumerate(zip(contest.layers, expected, strict=True)):
        arrays = {"answer": right.reference, "spread": right.spread}
        arrays |= {"plain": right.plain} if right.plain is not None else {}
        where = f"{of_whole}{of_layer(number)}"
        named = {f"the expected {name}{where}": array for name, array in arrays.items()}

        def rewrite(layer: Layer = layer, right: Expected = right) -> None:
            seed = right.sample.seed if right.sample else None
            again = _right_answer(contest.op, layer, whole, seed)
            right.reference.copy_(again.reference)
            right.spread.copy_(again.spread)
            if right.plain is not None and again.plain is not None:
                right.plain.copy_(again.plain)

        contest.guard.watch(named, rewrite)
        names |= named.keys()
    return names


def redraw(contest: RunningContest) -> None:
    """Draw new activations, from a seed that was never used, and record it in the rows."""
    recordings = [of for layer in contest.layers for of in layer.dense.recordings.values()]
    contest.draw = operands.other_draw(contest.draw, recordings)
    for number, layer in enumerate(contest.layers):
        dense = layer.dense
        fresh = dense.activations, contest.draw, dense.recordings, dense.weights
        operands.redraw(layer.problem, contest.op, *fresh)
        contest.guard.renew({f"the operand {name}{of_layer(number)}" for name in dense.activations})
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
        # A launch with its own output buffer writes over the poison. One that allocates is
        # likely to get the same memory again.
        for out in as_tuple(call()):
            if (elements := _elements(out, contest.guard)) is not None:
                poison(elements)
        del out, elements  # so that the memory is free for the next call
    outputs = call()
    contest.check_tampering()
    allowed = (entry.row.case.contender.error or {}).get("at_most")
    results = []
    for layer, (out, right) in enumerate(zip(as_tuple(outputs), expected, strict=True)):
        _elements(out, contest.guard)
        result = check(out, replace(right, allowed=allowed), entry.pattern)
        lost, reason = launches[layer].lost, result.reason
        if count := lost() if lost else 0:
            values = "value" if count == 1 else "values"  # results/formatting.py loads pandas
            reason = f"{count} {values} lost: the format had no room for them"
        if reason and entry.running:
            entry.end(Status.WRONG, f"{when}{of_layer(layer)}: {reason}")
        results.append(result)
    if first and entry.running:
        references = [where_stored(right, entry.pattern).reference for right in expected]
        compared = [right.part(out) for out, right in zip(as_tuple(outputs), expected, strict=True)]
        if right_sums := fingerprint_of(references, tuple(compared)):
            in_part = any(right.sample for right in expected)
            spots.fingerprints[B][number] = right_sums.around(outputs) if in_part else right_sums
    worst = max(results, key=lambda result: result.error or 0.0)
    return {name: value for name, value in vars(worst).items() if name != "reason"}


def _record(entry: Entry, errors: Mapping[str, Any], scope: str = "") -> None:
    for measure, row in entry.results.items():
        if scope in ("", measure[0]):
            entry.results[measure] = replace(row, **errors, draws=entry.row.draws)


def _answers_with_room(contest: RunningContest, when: str) -> dict[bool, list[Expected]] | None:
    """Compute what each layer is expected to give, with and without the op's mask (`_whole`).

    If memory runs out, drop the A/A twins, then all contenders, and return None. The weights of all
    layers of Qwen3-32B in fp8, dense and 2:4, take 57 GB, and their twins 57 GB more.
    """
    for ends in (lambda entry: entry.row.case.contender.twin, lambda entry: True):
        kinds = sorted({_whole(contest, entry) for entry in contest.entries if entry.running})
        try:
            answers = {}
            for whole in kinds:
                seed = SystemRandom().getrandbits(64) if _in_part(contest, whole, when) else None
                answers[whole] = [_right_answer(contest.op, x, whole, seed) for x in contest.layers]
            return answers
        except (torch.OutOfMemoryError, MemoryError) as error:
            reason = f"reference, {when}: {one_line(error)}"
        for entry in contest.entries:
            if entry.running and ends(entry):
                entry.end(Status.OUT_OF_MEMORY, reason)
        gc.collect()
        if contest.device.type == "cuda":
            torch.cuda.empty_cache()
    return None


def _fit(contest: RunningContest, expected: Sequence[Expected]) -> bool:
    """Return whether the right answers fit their dtype; if not, every contender ends."""
    for right in expected:
        largest = float(right.reference.abs().max()) if right.reference.numel() else 0.0
        limits = torch.finfo if right.dtype.is_floating_point else torch.iinfo
        most = -limits(right.dtype).min
        if largest > most:
            fits = f"expected an answer that fits {right.dtype}, up to {most:.4g}"
            for entry in contest.entries:
                if entry.running:
                    entry.end(Status.UNSUPPORTED, f"{fits}; found {largest:.4g}")
            return False
    return True


def _right_answer(op: Op, layer: Layer, whole: bool, seed: int | None) -> Expected:
    """Compute the right answer, or with a seed that of a part, if the op has one.

    torch's own comes first, before fp64 copies take memory.
    """
    problem, weights = layer.problem, layer.dense.weights
    every = {**(without_mask(op, weights) if whole else weights), **layer.dense.activations}
    sample = None if seed is None else op.sample(problem, every, seed)
    if sample:
        problem, every = sample.problem, {**sample.operands}
    dense = {name: every[name] for name in op.arguments}
    plain = with_fields(op.definition, problem)(**dense)
    arguments = {name: operand.double() for name, operand in dense.items()}
    dtype = problem["dtype"]
    products, sums = roundings(dtype, op.rounds(dtype))
    return Expected(
        reference=with_fields(op.definition, problem)(**arguments),
        spread=with_fields(op.spread, problem)(**arguments),
        dtype=OUTPUTS[dtype],
        depth=op.longest_sum(problem, arguments),
        products=products,
        sums=sums,
        parts=op.parts(problem),
        plain=plain,
        sample=sample,
    )


def _elements(out: Output, guard: Guard) -> Tensor | None:
    """Return the elements of an output. Raises TamperingError if they lie in an operand."""
    elements = values_of(out)
    if type(elements) is not Tensor:
        return None  # `check` reports it
    guard.refuse(elements)
    return elements
