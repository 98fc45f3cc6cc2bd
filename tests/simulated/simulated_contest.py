"""One problem with all its contenders on the simulated GPU: no operands, no kernels.

    non-zeros    elements x (1 - requested sparsity)
    work         of a contender in format dense: all elements; in any other: the non-zeros
    time         by gpu_model.py; a hot call does not read what the L2 cache holds
    faults       as planned; every other case runs and is right
    unsupported  what a GPU of the simulated generation cannot run; the default GPU runs all

    search       the choice is one of WAYS configurations. A pinned choice is used again; a later
                 process times the finalists of what an earlier one has timed

Draws depend only on the seed, the problem and the process. So a resumed run has the same rows as
one that was never stopped.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, prod
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from sparsebench.formats.dense import Dense
from sparsebench.formats.int4 import Int4
from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.bench.operands import level_of
from sparsebench.harness.bench.sampling import CHAIN, SAMPLES_PER_ROUND, layers_of
from sparsebench.harness.catalog import load_kernel, load_op, weights_format
from sparsebench.harness.plan.selection import meets
from sparsebench.kernels import _kernel as kernel_contract
from sparsebench.kernels._common.search import Search, Trial, finalists
from sparsebench.kernels._kernel import DTYPES
from sparsebench.results.ceilings import check_bound
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.tables.families import QUANTISED
from tests.simulated.gpu_model import (
    UNPRUNED,
    Array,
    Spec,
    blur,
    call_us,
    card_effects,
    samples,
    ways,
)

CRASH_CODE = 7
MEMORY_BYTES = 80 * 2**30
ENERGY_WINDOW_S = 3.0
COOL = {  # an H200's clocks; watts and degrees are made up
    "sm_mhz": 1980.0,
    "sm_mhz_min": 1980.0,
    "memory_mhz": 3201.0,
    "power_w": 500.0,
    "temperature_c": 45.0,
    "power_capped_us": 0.0,
    "thermal_us": 0.0,
    "hardware_us": 0.0,
}


@dataclass(frozen=True)
class Work:
    """The work of a problem in the fields of its rows, and bytes of sparse weights and output."""

    sparsity: float
    nnz: int
    flops: float
    dense_flops: float
    fewest_bytes: int
    dense_bytes: int
    sparse_bytes: int
    output_bytes: int


def run(
    spec: Spec,
    problem: Problem,
    contenders: Sequence[Contender],
    options: ContestOptions,
    announce: Callable[[str, str], None] = lambda case, stage: None,
) -> list[Row]:
    """Return the rows of every contender, unless a planned crash comes first."""
    work = work_of(problem)
    rows = [_row(spec, Case(problem, contender), work, options) for contender in contenders]
    for number, row in enumerate(rows):
        announce(row.case.id, "prepare")
        if reason := unsupported(spec, problem, row.case.contender):
            rows[number] = replace(row, status=Status.UNSUPPORTED, detail=reason)
            continue
        faults = _faults(spec, row)
        if "crash" in faults:
            print("a planned crash", file=sys.stderr, flush=True)
            os._exit(CRASH_CODE)
        if "failed" in faults:
            rows[number] = replace(row, status=Status.FAILED, detail="planned: failed")
    announce("", "timing")
    timed = [_time(spec, rows, work, options, *measure) for measure in options.measures]
    return [row for measured in timed for row in measured]


def unsupported(spec: Spec, problem: Problem, contender: Contender) -> str | None:
    """Return why a kernel cannot run the problem on another generation of GPU, or None.

    Packages that are missing on this machine do not count. On the default GPU everything runs.
    """
    if spec.capability == Spec().capability:
        return None
    major, minor = map(int, spec.capability.split("."))
    kernel = load_kernel(contender.kernel)
    facts = SimpleNamespace(major=major, minor=minor, total_memory=MEMORY_BYTES)
    cuda: dict[str, Any] = {
        "get_device_capability": lambda device: (major, minor),
        "get_device_properties": lambda device: facts,
    }
    with patch.multiple(torch.cuda, **cuda):
        reason = kernel_contract.unsupported(kernel, problem, torch.device("cuda"))
    return None if reason is None or "pip install" in reason else reason


def work_of(problem: Problem) -> Work:
    op, itemsize = load_op(problem.op), DTYPES[problem["dtype"]].itemsize
    sizes = op.sizes(problem.fields)
    size = {n: prod(sizes[name] for name in o.shape) for n, o in op.operands.items()}
    full = op.elements(problem)
    part = {name: 1 - level_of(op, problem.fields, name) for name in op.weights}
    nonzeros = {name: round(part.get(name, 1) * count) for name, count in full.items()}
    nnz = sum(nonzeros[name] for name in op.weights)
    return Work(
        **op.work(problem, nonzeros),
        sparsity=1 - nnz / sum(full[name] for name in op.weights),
        dense_bytes=itemsize * sum(size[name] for name in op.weights),
        sparse_bytes=itemsize * sum(round(part[name] * size[name]) for name in op.weights),
        output_bytes=op.output_bytes(problem, nonzeros),
    )


def _row(spec: Spec, case: Case, work: Work, options: ContestOptions) -> Row:
    choice, candidates = _search(spec, case, options)
    facts = asdict(work)
    contest = f"draws {spec.seed} {case.problem.id} {options.replicate} {options.attempt}"
    held = facts.pop("output_bytes") + _stored_bytes(case, work)
    del facts["sparse_bytes"]
    return Row(
        case,
        Status.OK,
        options.replicate,
        options.attempt,
        options.reference,
        device=spec.identity,
        clock="sim",
        choice=choice,
        candidates=tuple(candidates),
        late=0.0,
        error=0.0,
        error_of_bound=0.0,
        usual_error=0.0,
        bias=0.0,
        usual_bias=0.0,
        draws=tuple(_draw(contest).integers(2**31, size=3).tolist()),
        digest=f"simulated {case.problem.id}",
        stored_bytes=_stored_bytes(case, work),
        held_bytes=held,
        peak_bytes=held,
        convert_us=(work.dense_bytes + _stored_bytes(case, work)) / spec.bandwidth_gb_per_s / 1e3,
        prepare_s=0.0,
        **facts,
    )


def _search(
    spec: Spec, case: Case, options: ContestOptions
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a contender's choice in a process, and what it timed; a twin's is its original's.

    Times are of a call that takes 100 µs with the fastest configuration. All contenders of a
    problem have the same configurations, so that equal ones stay equal.
    """
    if pinned := options.pinned.get(case.id):
        return dict(pinned), []
    original = case.original.id
    if not spec.regret:
        return {"simulated": True, "regret": 0.0}, []
    every = ways(spec, _draw(f"ways {spec.seed} {case.problem.id}"))
    choices = [{"simulated": True, "way": i, "regret": round(t, 6)} for i, t in enumerate(every)]
    again = {choice["way"] for choice in finalists(options.timed.get(original, ()))}
    choices = [choice for choice in choices if not again or choice["way"] in again]
    draw = _draw(f"search {spec.seed} {options.replicate} {original}")
    took = blur(spec, np.array([choice["regret"] for choice in choices]), draw)
    trials = tuple(Trial(median_us=round(100 * exp(t), 2)) for t in took)
    search = Search(int(took.argmin()), trials)
    return choices[search.best], search.lines(choices, whole=True)


def _draw(seed: str) -> np.random.Generator:
    return np.random.default_rng(list(hashlib.sha256(seed.encode()).digest()))


def _stored_bytes(case: Case, work: Work) -> int:
    stored = work.dense_bytes if _dense_weights(case.contender) else work.sparse_bytes
    fewer = case.contender.format in QUANTISED
    return round(_share_of_bits(case.problem) * stored) if fewer else stored


def _share_of_bits(problem: Problem) -> float:
    """Return the bits of a weight's value over those of its dtype."""
    full = 8 * DTYPES[problem["dtype"]].itemsize
    bits = problem["weight_bits"] if "weight_bits" in problem.fields else None
    return float((bits or full) / full)


def _dense_weights(contender: Contender) -> bool:
    return weights_format(contender.format) in (Dense, Int4)


def _faults(spec: Spec, row: Row) -> set[str]:
    problem, contender = row.case.problem, row.case.contender
    now = [fault for fault in spec.faults if fault.process in (None, row.replicate)]
    return {fault.fault for fault in now if meets(problem, contender, fault.when)}


def _time(
    spec: Spec, rows: Sequence[Row], work: Work, options: ContestOptions, scope: str, cache: str
) -> list[Row]:
    """Return the rows for one scope and cache state; the correct ones have samples."""
    rows = [replace(row, scope=scope, cache=cache) for row in rows]
    running = [row for row in rows if row.status is Status.OK]
    if not running:
        return rows
    seed = f"{spec.seed} {options.replicate} {rows[0].case.problem.id} {scope} {cache}"
    times = [_call_us(spec, row, work) * exp(_effects(spec, row)) for row in running]
    (taken,) = samples(spec, times, _draw(seed))
    telemetry = _telemetry(spec, taken)
    done = {}
    for row, times_us in zip(running, taken, strict=True):
        done[row.case.id] = replace(_measure(row, times_us, work, options), telemetry=telemetry)
    return [done.get(row.case.id, row) for row in rows]


def _effects(spec: Spec, row: Row) -> float:
    """Return the log of how much longer a contender takes, by its choice and on this card."""
    case = row.case
    draw = _draw(f"card {spec.seed} {case.problem.id} {case.original.contender.label}")
    return float(row.choice.get("regret", 0)) + float(card_effects(spec, draw))


def _call_us(spec: Spec, row: Row, work: Work) -> float:
    problem, contender = row.case.problem, row.case.contender
    counted = round(_share_of_bits(problem) * work.sparse_bytes)
    moved = work.fewest_bytes - counted + _stored_bytes(row.case, work)
    cached = spec.l2_bytes / layers_of(row.scope) if row.cache == "hot" else 0
    flops = work.dense_flops if _dense_weights(contender) else work.flops
    return call_us(spec, contender, problem["dtype"], flops, max(0, moved - cached), row.scope)


def _measure(row: Row, taken: Array, work: Work, options: ContestOptions) -> Row:
    """Put samples, bound and energy into a row; a row faster than the bound has no samples."""
    times_us = tuple(round(float(us), 3) for us in taken.flat)
    typical_us = median(times_us)
    if options.energy and row.scope != CHAIN:
        loads = {load: _under_load(row, load, typical_us) for load in ("half", "full")}
        joule = loads["full"]["j_per_call"]
        row = replace(row, energy_j=joule, energy_window_s=ENERGY_WINDOW_S, loads=loads)
    if options.ceilings:
        row = check_bound(options.bounded(row, work.output_bytes), typical_us)
        if row.status is not Status.OK:
            return row
    return replace(row, samples_us=times_us, samples_per_block=SAMPLES_PER_ROUND)


def _under_load(row: Row, load: str, typical_us: float) -> dict[str, float]:
    """Return a call under a load: unpruned weights take longer, and the pauses take energy, too."""
    longer = UNPRUNED[load] / UNPRUNED[""] if row.case.contender.is_unpruned else 1.0
    us = typical_us * longer
    busy_s = ENERGY_WINDOW_S / (2 if load == "half" else 1)
    return {
        "us_per_call": us,
        "j_per_call": COOL["power_w"] * us / 1e6 * ENERGY_WINDOW_S / busy_s,
        "sm_mhz": COOL["sm_mhz"] / longer,
        "window_s": ENERGY_WINDOW_S,
        "calls": round(busy_s * 1e6 / us),
    }


def _telemetry(spec: Spec, times_us: Array) -> dict[str, float]:
    """Return the telemetry of the contest as NVML would report it (telemetry.py)."""
    window_us = float(times_us.sum())
    capped = {"power_capped_us": spec.limited * window_us}
    return {"seconds": window_us / 1e6, **COOL, **capped}
