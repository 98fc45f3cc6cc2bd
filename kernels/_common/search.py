"""Choosing between several ways to compute the same product: time each briefly, keep the fastest.

    warm every candidate (it compiles); those that raise are left out
    capture each in a CUDA graph, where it can be: as the harness times it
    rounds 1 to 3    a sample of each, in turn, the L2 cache flushed before it
    rounds from 4 on a sample of each that is left: whose least is clearly above the best drop out
    the lowest median wins

Before each round the GPU is given a head start of flushes, so that launches queue up behind it and
the events enclose the work alone, not the time the host takes to launch it. A call of cuSPARSELt
takes the host 300 us, longer than any head start: 17 ways to call it, not captured, all looked
alike, and the one that was taken was up to 1.7 times as slow as the best.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.l2_flush import flusher
from sparsebench.kernels._kernel import Launch, Output

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROUNDS = 7
SHORT_US, SHORT_ROUNDS = 100.0, 25  # short ones scatter by 2 to 6 % a sample, and cost little
# A candidate that is this much slower than the best in its best of TRIALS is not timed again. One
# sample is no judge: in a published run it cost torch's BSR a third (block 32, 95 %).
DROP, TRIALS = 1.25, 3


class Candidate(Protocol):
    """A call that enqueues the work; `code` is the digest of its machine code (BoundKernel)."""

    @property
    def code(self) -> str | None: ...

    def __call__(self) -> Output: ...


def fastest_launch(
    configs: "Sequence[DataclassInstance]",
    candidates: Sequence[Candidate],
    by: Mapping[str, Any],
    device: torch.device,
    threads: int = 1,
) -> Launch:
    """Return the launch of the fastest candidate.

    candidates  one for each configuration, in the same order
    by          how the configurations were found (tuned_table.choose); Launch.choice is the fields
                of the fastest configuration and these
    threads     as for `fastest`, which raises Unsupported
    """
    best = fastest(candidates, device, threads)
    choice = asdict(configs[best]) | dict(by)
    return Launch(candidates[best], choice, candidates[best].code)


def fastest(
    candidates: Sequence[Callable[[], object]], device: torch.device, threads: int = 1
) -> int:
    """Return the index of the fastest candidate; the first one where there is nothing to compare.

    `threads` > 1 makes the first calls, which compile, in parallel. Raises Unsupported, with each
    reason, when every candidate raises.
    """
    if len(candidates) == 1 or device.type != "cuda":
        return 0
    running = _warm(candidates, device, threads)
    pool = torch.cuda.graph_pool_handle()
    calls = {i: _captured(candidates[i], device, pool) for i in running}
    flush = flusher(device)
    samples: dict[int, list[float]] = {i: [] for i in running}
    best = SHORT_US
    for number in range(SHORT_ROUNDS):
        if number >= ROUNDS and best >= SHORT_US:
            break
        for i, time_us in _round([(i, calls[i]) for i in running], flush, device):
            samples[i].append(time_us)
        least = {i: min(samples[i]) for i in running}
        best = min(least.values())
        if number + 1 >= TRIALS:
            running = [i for i in running if least[i] <= DROP * best]
    return min(running, key=lambda i: median(samples[i]))


def _warm(
    candidates: Sequence[Callable[[], object]], device: torch.device, threads: int
) -> list[int]:
    """Call every candidate once and return those that did not raise."""
    attempt = partial(_reason, device=device)
    if threads == 1:
        reasons = [attempt(candidate) for candidate in candidates]
    else:
        # Only a runtime call makes the device's context current in a new thread.
        with ThreadPoolExecutor(threads, "", partial(torch.cuda.synchronize, device)) as pool:
            reasons = list(pool.map(attempt, candidates))
        # Whoever raised is called again, alone: CPython 3.11's parser, which compiling a Triton
        # kernel calls, can fail in several threads at a time (cpython issue 106905).
        pairs = zip(reasons, candidates, strict=True)
        reasons = [reason and attempt(candidate) for reason, candidate in pairs]
    torch.cuda.synchronize(device)  # an illegal access surfaces here, and is nobody's reason
    running = [i for i, reason in enumerate(reasons) if reason is None]
    if not running:
        raise Unsupported("no candidate runs: " + "; ".join(sorted({str(r) for r in reasons})))
    return running


def _reason(candidate: Callable[[], object], device: torch.device) -> str | None:
    """Call the candidate; say why it cannot run, or None."""
    try:
        with torch.cuda.device(device):  # the current device is a property of the thread
            candidate()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def _captured(
    candidate: Callable[[], object], device: torch.device, pool: Any
) -> Callable[[], object]:
    """Return a replay of the candidate, or itself. All share memory: their products are unused."""
    graph = torch.cuda.CUDAGraph()
    try:
        with (
            torch.cuda.device(device),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            candidate()
    except RuntimeError:
        torch.cuda.synchronize(device)
        return candidate
    return graph.replay


def _round(
    candidates: Sequence[tuple[int, Callable[[], object]]],
    flush: Callable[[], None],
    device: torch.device,
) -> list[tuple[int, float]]:
    """Time each candidate once and return (index, µs)."""
    marks = []
    for _ in range(2 * len(candidates)):  # about 30 µs each at 4 TB/s; a launch takes 10 to 60
        flush()
    for i, candidate in candidates:
        begin, end = _event(), _event()
        flush()
        begin.record()
        candidate()
        end.record()
        marks.append((i, begin, end))
    torch.cuda.synchronize(device)
    return [(i, 1e3 * begin.elapsed_time(end)) for i, begin, end in marks]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
