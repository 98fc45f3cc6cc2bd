"""Make a contender ready: convert its weights; let its kernel pack, compile and tune.

    dense weights ─ convert ─> format ─ prepare (kernel) ─> launch, run once
    further layers of a chain: likewise, each with the choice of the first

Contenders of a contest with equal formats share one conversion; each row has its time. Memory is
counted by torch's allocator.
"""

import gc
import json
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats._format import Format
from sparsebench.harness.bench.contest_state import (
    NO_MEMORY,
    Entry,
    RunningContest,
    end_status,
    synchronize,
)
from sparsebench.harness.bench.operands import DenseOperands, Layer, without_mask
from sparsebench.harness.bench.tampering import arrays_of
from sparsebench.harness.bench.timing import Chain
from sparsebench.harness.catalog import load_kernel, load_op, masks, weights_format
from sparsebench.harness.machine.device import is_simulated
from sparsebench.kernels import _kernel
from sparsebench.kernels._kernel import Launch, Operands, Portfolio
from sparsebench.results.record import Contender, Problem

CHOICE_BYTES = 2**14  # most bytes of a choice as JSON; the longest published one has 1.4 KB


def prepare(contest: RunningContest, entry: Entry) -> None:
    """Convert, then let the kernel pack, compile and tune."""
    contender = entry.row.case.contender
    with contest.at(entry, "convert"):
        kernel = load_kernel(contender.kernel)
        if reason := unsupported(contest.problem, contender, contest.device):
            raise Unsupported(reason)
        weights, convert_us = _convert(contest, contender)
        stored = sum(weight.stored_bytes for weight in weights.values())
        entry.row = replace(entry.row, convert_us=convert_us, stored_bytes=stored)
        weights = {name: copy(weight) for name, weight in weights.items()}  # arrays are shared
        if contest.op.pattern:  # a sparse output is packed like it
            pattern = weights.pop(contest.op.pattern)
            entry.pattern = None if contender.format == "dense" else pattern
    if not entry.running:
        return
    with contest.at(entry, "prepare"), _memory(contest.device) as memory:
        began = time.perf_counter()
        definition = contest.op.definition_at(contest.problem)
        operands = Operands(
            contest.problem,
            weights,
            {name: x.detach() for name, x in contest.dense.activations.items()},
            definition,
            _earlier_choice(contest, entry),
            entry.pattern,
            contest.options.timed.get(entry.row.case.id, ()),
        )
        entry.launch = kernel.prepare(operands, **contender.options)
        entry.launch()
        synchronize(contest.device)
        spent = time.perf_counter() - began
        choice, code = json_choice(entry.launch.choice), entry.launch.code
        if code is not None and type(code) is not str:
            raise TypeError(f"code: expected text or None, found {type(code).__name__}")
        if isinstance(kernel, Portfolio) and not isinstance(choice.get("chosen"), str):
            raise TypeError(f"portfolio: expected `chosen`, the kernel that ran, found {choice}")
        timed = tuple(entry.launch.candidates)
        entry.row = replace(entry.row, prepare_s=spent, choice=choice, candidates=timed, code=code)
    entry.row = replace(entry.row, **memory)
    if entry.running:
        with contest.at(entry, "prepare"):  # apart, so that checksums do not count as memory
            contest.check_tampering()


def prepare_chain(contest: RunningContest, entry: Entry) -> None:
    """Make the further layers of a chain ready, or record why this contender has no chain."""
    if len(contest.layers) == 1 or not entry.running:
        return
    with contest.at(entry, "chain"):
        assert entry.launch is not None
        try:
            further = [_layer(contest, entry, layer) for layer in contest.layers[1:]]
            entry.chain = Chain((entry.launch, *further))
        except (FormatError, Unsupported, *NO_MEMORY) as error:
            status, reason = end_status(error)
            entry.leave_chain(status, f"chain: {reason}")
        synchronize(contest.device)
        contest.check_tampering()


def _layer(contest: RunningContest, entry: Entry, layer: Layer) -> Launch:
    contender = entry.row.case.contender
    operands = Operands(
        layer.problem,
        dict(_weights_in_format(layer.problem, contender, layer.dense)),
        {name: x.detach() for name, x in layer.dense.activations.items()},
        contest.op.definition_at(layer.problem),
        entry.row.choice or None,
    )
    launch = load_kernel(contender.kernel).prepare(operands, **contender.options)
    launch()
    return launch


def json_choice(choice: object) -> dict[str, Any]:
    """Return a choice after a round trip through JSON. Raises TypeError if JSON cannot hold it."""
    try:
        written = json.dumps(choice, allow_nan=False)
        result = json.loads(written)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"choice: expected text, numbers and lists: {error}") from error
    if len(written) > CHOICE_BYTES:
        raise TypeError(f"choice: expected at most {CHOICE_BYTES} bytes, found {len(written)}")
    if not isinstance(result, dict):
        raise TypeError(f"choice: expected a mapping, found {type(choice).__name__}")
    return result


def _earlier_choice(contest: RunningContest, entry: Entry) -> Mapping[str, Any] | None:
    """Return what an earlier process chose; a twin takes the choice of its original."""
    case = entry.row.case
    originals = {e.row.case.id: e.row.choice for e in contest.entries if e.row.choice}
    pinned = contest.options.pinned.get(case.id)
    return pinned or (originals.get(case.original.id) if case.contender.twin else None)


@contextmanager
def _memory(device: torch.device) -> Iterator[dict[str, Any]]:
    """Fill `held_bytes` and `peak_bytes`: device memory that the block added, after it and at most.

    torch's allocator counts it, without memory that a library allocates itself.

    Garbage in reference cycles is freed first. Otherwise Python would free it at a later moment and
    the difference would be too small: rows were published with peaks of 0 and of -5.1 GB.
    """
    memory: dict[str, Any] = {}
    if device.type != "cuda":
        yield memory
        return
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield memory
    gc.collect()
    memory["held_bytes"] = torch.cuda.memory_allocated(device) - before
    memory["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before


def unsupported(problem: Problem, contender: Contender, device: torch.device) -> str | None:
    """Return why a contender cannot run a problem on a device, or None; build nothing."""
    if reason := _kernel.unsupported(load_kernel(contender.kernel), problem, device):
        return reason
    op = load_op(problem.op)
    dtypes = {name: op.operands[name].dtypes[problem["dtype"]] for name in op.weights}
    params = {n: json.dumps(contender.params_of(n), sort_keys=True) for n in op.weights}
    refusals = (_refusal(contender.format, params[n], dtypes[n]) for n in op.weights)
    return next(filter(None, refusals), None)


def unsupported_on(device: str, problem: Problem, contender: Contender) -> str | None:
    """Return why a contender cannot run on the device of this name; a simulated one runs all."""
    return None if is_simulated(device) else unsupported(problem, contender, torch.device(device))


@cache
def _refusal(format_name: str, params: str, dtype: torch.dtype) -> str | None:
    """Return why a format of ours refuses the params or the dtype, tried on zeros, or None."""
    format_ = weights_format(format_name)
    if not format_.__module__.startswith("sparsebench."):
        return None
    try:
        format_.from_dense(torch.zeros(4, 4, dtype=dtype), **json.loads(params))
    except FormatError as refusal:
        return str(refusal)
    return None


def _convert(contest: RunningContest, contender: Contender) -> tuple[dict[str, Format], float]:
    key = f"{contender.format} {sorted(contender.params.items())}"
    if key not in contest.conversions:
        weights: dict[str, Format] = {}
        took_us = []
        for _ in range(2):  # the first call also allocates memory and loads kernels
            weights.clear()
            synchronize(contest.device)
            start = time.perf_counter()
            weights.update(_weights_in_format(contest.problem, contender, contest.dense))
            synchronize(contest.device)
            took_us.append(1e6 * (time.perf_counter() - start))
        contest.check_tampering()
        contest.conversions[key] = weights, min(took_us)
        _watch(contest, contender, weights)
    return contest.conversions[key]


def _weights_in_format(
    problem: Problem, contender: Contender, dense: DenseOperands
) -> Iterator[tuple[str, Format]]:
    """Yield each weight in the contender's format, or dense if that stores activations."""
    store = weights_format(contender.format).from_dense
    op, fields = load_op(problem.op), problem.fields
    weights = without_mask(op, dense.weights) if contender.format == "dense" else dense.weights
    for name, weight in weights.items():
        of_mask = masks(contender.format) and name == op.mask
        params = op.format_params(fields) if of_mask else contender.params_of(name)
        yield name, store(weight.detach(), **params)


def _watch(contest: RunningContest, contender: Contender, weights: Mapping[str, Format]) -> None:
    """Watch the arrays of a conversion, which contenders share, until they are released."""
    arrays = arrays_of(weights, contender.format)
    references = {name: weakref.ref(array) for name, array in arrays.items()}

    def rewrite() -> None:
        again = arrays_of(
            dict(_weights_in_format(contest.problem, contender, contest.dense)), contender.format
        )
        for name, find in references.items():
            array = find()
            if array is not None and array.shape == again[name].shape:
                array.copy_(again[name])

    contest.guard.watch(arrays, rewrite, held=False)
