"""Make a contender ready: convert its weights; let its kernel pack, compile and tune.

    dense weights ─ convert ─> format ─ prepare (kernel) ─> launch, run once
    further layers of a chain: likewise, each with the choice of the first

Contenders of a contest with equal formats share one conversion; each row has its time. Memory is
counted by torch's allocator.
"""

import gc
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

import torch

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.dense import Dense
from sparsebench.harness.bench.contest_state import (
    NO_MEMORY,
    CheckedCall,
    ContestOptions,
    RunningContender,
    end_status,
    synchronize,
)
from sparsebench.harness.bench.operands import ChainLayer, Layers, without_mask
from sparsebench.harness.bench.sampling import CHAIN
from sparsebench.harness.bench.spot_checks import SpotChecks
from sparsebench.harness.bench.stages import Stages
from sparsebench.harness.bench.tampering import arrays_of
from sparsebench.harness.bench.timing import Chain
from sparsebench.harness.catalog import is_outside, load_kernel, load_op, masks, weights_format
from sparsebench.harness.machine.device import identity
from sparsebench.harness.machine.stand_in import stand_in
from sparsebench.kernels import _kernel
from sparsebench.kernels._kernel import Launch, Operands, Portfolio
from sparsebench.results.record import Case, Contender, Problem, Row, Status

FACTS: Mapping[str, tuple[Any, str, int]] = {
    "choice": (dict, "a mapping", 2**14),
    "candidates": (list | tuple, "a list", 2**18),
    "code": (str | None, "text or None", 2**10),
}
"""What a launch states for its row: the type, and most bytes as JSON.

The longest that are published have 1.6 KB, 54 KB and 45 bytes.
"""

Weights = dict[str, Format]


def entries_of(
    problem: Problem,
    contenders: Sequence[Contender],
    device: torch.device,
    options: ContestOptions = ContestOptions(),  # noqa: B008 (frozen)
) -> list[RunningContender]:
    """Return an entry for each contender; one that cannot run the problem here has ended."""
    about = options.replicate, options.attempt, options.reference
    entries = [
        RunningContender(Row(Case(problem, contender), Status.OK, *about, device=identity(device)))
        for contender in contenders
    ]
    for entry in entries:
        if is_outside(entry.contender):
            continue  # its process says so
        if reason := unsupported(problem, entry.contender, device):
            entry.end(Status.UNSUPPORTED, reason)
    return entries


class Conversions:
    """The weights of a contest in the formats of its contenders, which share equal ones."""

    def __init__(self, layer: ChainLayer, stages: Stages) -> None:
        self._layer, self._stages = layer, stages
        self._done: dict[str, tuple[Weights, float]] = {}

    def weights(self, contender: Contender) -> tuple[Weights, dict[str, Any]]:
        """Return a contender's weights, whose arrays are shared, and the facts for its row."""
        key = f"{contender.format} {sorted(contender.params.items())} {contender.weights}"
        if key not in self._done:
            weights: Weights = {}
            took_us = []
            for _ in range(2):  # the first call also allocates memory and loads kernels
                weights.clear()
                synchronize(self._stages.device)
                start = time.perf_counter()
                weights.update(weights_in_format(self._layer, contender))
                synchronize(self._stages.device)
                took_us.append(1e6 * (time.perf_counter() - start))
            self._stages.verify()
            self._done[key] = weights, min(took_us)
            self._stages.guard.watch(arrays_of(weights, contender.format), held=False)
        weights, convert_us = self._done[key]
        stored = sum(weight.stored_bytes for weight in weights.values())
        copies = {name: copy(weight) for name, weight in weights.items()}
        return copies, {"convert_us": convert_us, "stored_bytes": stored}


def prepare(operands: Operands, contender: Contender) -> tuple[Launch, dict[str, Any]]:
    """Let the kernel pack, compile and tune, and run it once; return the facts for its row, too."""
    kernel, began = load_kernel(contender.kernel), time.perf_counter()
    launch = kernel.prepare(operands, **contender.options)
    launch()
    synchronize(operands.device)
    spent = time.perf_counter() - began
    facts = facts_of(vars(launch))
    if isinstance(kernel, Portfolio) and not isinstance(facts["choice"].get("chosen"), str):
        expected = "portfolio: expected `chosen`, the kernel that ran"
        raise TypeError(f"{expected}, found {facts['choice']}")
    return launch, {"prepare_s": spent, **facts}


def prepare_layer(layer: ChainLayer, contender: Contender, choice: Mapping[str, Any]) -> Launch:
    """Make a further layer of a chain ready, with the choice of the first, and run it once."""
    operands = operands_of(layer, dict(weights_in_format(layer, contender)), choice or None)
    return prepare(operands, contender)[0]


def prepare_chain(layers: Layers, entry: RunningContender) -> None:
    """Make the further layers ready, or record why this contender has no chain."""
    try:
        choice, contender = entry.row.choice, entry.contender
        launches = [prepare_layer(layer, contender, choice) for layer in layers.each[1:]]
        chain = Chain((*entry.calls["kernel"].launches, *launches))
        entry.calls[CHAIN] = CheckedCall(chain, SpotChecks(layers.chain))
    except (FormatError, Unsupported, *NO_MEMORY) as error:
        entry.leave_chain(*end_status(error))


def operands_of(
    layer: ChainLayer, weights: Weights, pinned: Mapping[str, Any] | None, **further: Any
) -> Operands:
    """Return what a kernel receives: weights in its format, and the activations of a layer."""
    problem = layer.problem
    activations = {name: x.detach() for name, x in layer.dense.activations.items()}
    definition = load_op(problem.op).definition_at(problem)
    return Operands(problem, weights, activations, definition, pinned, **further)


def facts_of(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return FACTS after a round trip through JSON. Raises TypeError if a row cannot hold one."""
    facts: dict[str, Any] = {}
    for name, (kind, words, most) in FACTS.items():
        if not isinstance(value := stated[name], kind):
            raise TypeError(f"{name}: expected {words}, found {type(value).__name__}")
        try:
            written = json.dumps(value, allow_nan=False)
            facts[name] = json.loads(written)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"{name}: expected text, numbers and lists: {error}") from error
        if len(written) > most:
            raise TypeError(f"{name}: expected at most {most} bytes, found {len(written)}")
    return {**facts, "candidates": tuple(facts["candidates"])}


@contextmanager
def added_memory(device: torch.device) -> Iterator[dict[str, Any]]:
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
    stored = [name for name in op.weights if not op.operands[name].dense]
    dtypes = {name: op.operands[name].dtypes[problem["dtype"]] for name in stored}
    params = {n: json.dumps(contender.params_of(n), sort_keys=True) for n in stored}
    refusals = (_refusal(contender.format, params[n], dtypes[n]) for n in stored)
    return next(filter(None, refusals), None)


def unsupported_on(device: str, problem: Problem, contender: Contender) -> str | None:
    """Return why a contender cannot run on the device of this name.

    A stand-in runs all, and code from outside the package is not asked.
    """
    if stand_in(device) or is_outside(contender):
        return None
    return unsupported(problem, contender, torch.device(device))


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


def weights_in_format(layer: ChainLayer, contender: Contender) -> Iterator[tuple[str, Format]]:
    """Yield each weight in the contender's format, or dense if that stores activations."""
    store, problem = weights_format(contender.format).from_dense, layer.problem
    op, dense = load_op(problem.op), layer.with_weights_of(contender).dense.weights
    weights = without_mask(op, dense) if contender.format == "dense" else dense
    for name, weight in weights.items():
        if op.operands[name].dense:
            yield name, Dense.from_dense(weight.detach())
            continue
        of_mask = masks(contender.format) and name == op.mask
        params = op.format_params(problem.fields) if of_mask else contender.params_of(name)
        yield name, store(weight.detach(), **params)
