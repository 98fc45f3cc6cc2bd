"""Time equal calls, to see how far apart they come out.

    A/A           the same call twice, timed together, cold as in a run: |log ratio| should be 0
    empty launch  events around a graph that does almost nothing: the floor of an isolated GPU call

`read_pairs` takes readings; the other functions judge them.
"""

from collections.abc import Sequence
from math import expm1

import numpy as np
import torch
from torch.nn.functional import linear

from sparsebench.harness.bench.timing import TimedCall, ready, time_together
from sparsebench.harness.doctor.findings import DoctorFinding, grade, ok, warning
from sparsebench.harness.plan import selection
from sparsebench.kernels._kernel import DTYPES, Launch
from sparsebench.results.statistics.ratio import by_round, round_logs

PAIRS = 3
KINDS = "launch", "memory", "compute"  # kinds of the sizes in selection.py
# A/A: a note, a warning. Ten processes on an H200 had 0.8 % at most, and 4.8 % where launch-bound.
APART = {"launch": (0.05, 0.10), "memory": (0.01, 0.03), "compute": (0.01, 0.03)}


def read_pairs(device: torch.device) -> dict[str, list[float]]:
    """Return, for each kind of op, the log-ratio of each of PAIRS A/A pairs."""
    sizes = selection.sizes(device.type)
    return {
        kind: [_pair(_call(*size, device), device, f"{kind} {i}") for i in range(PAIRS)]
        for kind, size in zip(KINDS, sizes, strict=True)
    }


def floor(kind: str, logs: Sequence[float]) -> DoctorFinding:
    """Judge A/A pairs of one kind: smaller differences than theirs are not meaningful."""
    largest = max(expm1(abs(log)) for log in logs)
    check, reading = f"A/A, {kind}-bound", f"{len(logs)} pairs, {100 * largest:.2g} % apart at most"
    means = "Two runs of one call differ by this much, so smaller differences are not meaningful."
    do = "See other work, heat and clocks above, or measure more processes."
    return grade(largest, APART[kind], check, reading, means, do)


def empty_launch(time_us: float) -> DoctorFinding:
    """Report the floor of an isolated call, which pulls ratios of short calls towards 1."""
    means = "ratios are not meaningful for calls that take little longer"
    return ok("an empty launch", f"{time_us:.2g} µs: {means}")


def launches(holds: bool) -> DoctorFinding:
    """Judge whether a stream can be held, so that the GPU never waits for the host."""
    check = "launches"
    if holds:
        return ok(check, "return before their kernel has ended")
    means = "The GPU waits for the host in every sample, so every row is marked `host late`."
    do = "Unset CUDA_LAUNCH_BLOCKING, and do not measure under a profiler."
    return warning(check, "return only after their kernel has ended", means, do)


def _call(m: int, n: int, k: int, dtype: str, device: torch.device) -> Launch:
    x, w = (torch.randn(rows, k, device=device).to(DTYPES[dtype]) for rows in (m, n))
    return Launch(lambda: linear(x, w))


def _capture(call: Launch, device: torch.device) -> TimedCall:
    for _ in range(2):  # the first call loads libraries, which a capture forbids
        call()
    return ready(call, device)


def _pair(call: Launch, device: torch.device, seed: str) -> float:
    """Return the median over rounds of log(second / first), for a call and its twin."""
    both = [_capture(call, device) for _ in range(2)]
    first, second = time_together(both, device, seed)
    rounds = (by_round(taken.times_us, taken.per_round) for taken in (second, first))
    return float(np.median(round_logs(*rounds)))
