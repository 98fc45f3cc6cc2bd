"""A contender made ready: its weights converted, its kernel packed, compiled and tuned.

    dense weights ─ convert ─> format ─ prepare (kernel) ─> launch, run once

Contenders of a contest with equal formats share one conversion; each row has its time. Memory is
counted by torch's allocator.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparsebench.errors import Unsupported
from sparsebench.formats._format import Format
from sparsebench.harness.bench.entry import Entry, RunningContest, bound, synchronize
from sparsebench.harness.catalog import load_format, load_kernel
from sparsebench.kernels._kernel import Operands, Portfolio
from sparsebench.results.record import Case, Contender, Problem


def prepare(contest: RunningContest, entry: Entry) -> None:
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
        definition = bound(contest.op.definition, contest.problem)
        pinned = _pinned(contest, entry)
        activations, pattern = contest.dense.activations, entry.pattern
        given = Operands(contest.problem, weights, activations, definition, pinned, pattern)
        entry.launch = kernel.prepare(given, **contender.options)
        entry.launch()
        synchronize(contest.device)
        spent = time.perf_counter() - began
        choice, code = dict(entry.launch.choice), entry.launch.code
        if isinstance(kernel, Portfolio) and not isinstance(choice.get("chosen"), str):
            raise TypeError(f"portfolio: expected `chosen`, the kernel that ran, found {choice}")
        timed = tuple(entry.launch.candidates)
        entry.row = replace(entry.row, prepare_s=spent, choice=choice, candidates=timed, code=code)
    held, peak = memory.held_bytes, memory.peak_bytes
    entry.row = replace(entry.row, held_bytes=held, peak_bytes=peak)


def _split(
    contest: RunningContest, contender: Contender, packed: Mapping[str, Format]
) -> tuple[dict[str, Format], Format | None]:
    """Return the weights, and apart from them what a sparse output is to be packed like."""
    weights = {name: w for name, w in packed.items() if name != contest.op.pattern}
    pattern = packed[contest.op.pattern] if contest.op.pattern else None
    return weights, None if contender.format == "dense" else pattern


def _pinned(contest: RunningContest, entry: Entry) -> Mapping[str, Any] | None:
    """Return what an earlier process chose; a twin does what its original does."""
    case = entry.row.case
    originals = {e.row.case.id: e.row.choice for e in contest.entries if e.row.choice}
    original = Case(case.problem, replace(case.contender, twin=False)).id
    known = contest.options.pinned.get(case.id)
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


def _refuse(contest: RunningContest, contender: Contender) -> None:
    """Raise Unsupported where the kernel says, before anything is built, that it cannot run."""
    reason = unsupported(contest.problem, contender, contest.device)
    if reason:
        raise Unsupported(reason)


def unsupported(problem: Problem, contender: Contender, device: torch.device) -> str | None:
    """Say why a contender cannot run a problem on a device, or None; builds nothing."""
    kernel = load_kernel(contender.kernel)
    if kernel.op not in ("any", problem.op):
        return f"computes {kernel.op}, not {problem.op}"
    if kernel.device not in ("any", device.type):
        return f"runs on {kernel.device}, not on {device.type}"
    return kernel.unsupported(problem, device)


def _convert(contest: RunningContest, contender: Contender) -> tuple[dict[str, Format], float]:
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
                weights[name] = store(dense, **contender.params_of(name))
            synchronize(contest.device)
            took_us.append(1e6 * (time.perf_counter() - start))
        contest.packed[key] = weights, min(took_us)
    return contest.packed[key]
