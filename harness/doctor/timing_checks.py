"""Time equal calls, and one call by several clocks, to see how far apart they come out.

    A/A          the same call twice, timed together: |log ratio| should be 0
    clocks       graph     events around the replay of a captured call
                 events    events around the call as torch launches it
                 CUPTI     the kernels' own durations, by torch's profiler: no launch, no gap
    empty launch events around a graph that does almost nothing: the floor of an isolated GPU call

Functions that begin with `read_` take readings; the others judge them. A/A pairs are cold, as in a
run. Clocks are compared hot, because the profiler would time the flush too, and on the same few
calls: a compute-bound op of 170 µs takes 200 once power limits the clock.
"""

from collections.abc import Callable, Mapping, Sequence
from math import expm1
from statistics import median

import numpy as np
import torch
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity

from sparsebench.harness.bench.timing import TimedCall, ready, time_together
from sparsebench.harness.doctor.findings import Finding, grade, ok, warning
from sparsebench.harness.plan import selection
from sparsebench.kernels._kernel import DTYPES, Launch
from sparsebench.results.statistics.ratio import by_round, round_logs

PAIRS = 3
KINDS = "launch", "memory", "compute"  # kinds of the sizes in selection.py
# A/A: a note, a warning. Ten processes on an H200 had 0.8 % at most, and 4.8 % where launch-bound.
APART = {"launch": (0.05, 0.10), "memory": (0.01, 0.03), "compute": (0.01, 0.03)}

# m, n, k, and the µs it takes on an H200.
LADDER = (16, 512, 512, 5), (64, 4096, 4096, 20), (4096, 4096, 4096, 200)
DISAGREE = 0.03
LONG_US = 100.0  # below, an event pair and launch gaps are more than DISAGREE
CALLS = 50


def read_pairs(device: torch.device) -> dict[str, list[float]]:
    """Return, for each kind of op, the log-ratio of each of PAIRS A/A pairs."""
    sizes = selection.sizes(device.type)
    return {
        kind: [_pair(_call(*size, device), device, f"{kind} {i}") for i in range(PAIRS)]
        for kind, size in zip(KINDS, sizes, strict=True)
    }


def read_clocks(device: torch.device) -> list[dict[str, float]]:
    """Return µs by clock for each op of the LADDER, without CUPTI if it reports nothing."""
    readings, calls = [], [_call(m, n, k, "bf16", device) for m, n, k, _ in LADDER]
    for call, events_us in [(call, median(_by_events(call, device))) for call in calls]:
        graph = _capture(call, device)
        times_us = _by_cupti(graph.call, device)
        if times_us["graph"] < LONG_US:  # the host is slower than that, so queue the replays
            (taken,) = time_together([graph], device, "clocks", cache="hot")
            times_us["graph"] = median(taken.times_us)
        readings.append(times_us | {"events": events_us})
    return readings


def floor(kind: str, logs: Sequence[float]) -> Finding:
    """Judge A/A pairs of one kind: smaller differences than theirs are not meaningful."""
    largest = max(expm1(abs(log)) for log in logs)
    check, reading = f"A/A, {kind}-bound", f"{len(logs)} pairs, {100 * largest:.2g} % apart at most"
    means = "Two runs of one call differ by this much, so smaller differences are not meaningful."
    do = "See other work, heat and clocks above, or measure more processes."
    return grade(largest, APART[kind], check, reading, means, do)


def empty_launch(time_us: float) -> Finding:
    """Report the floor of an isolated call, which pulls ratios of short calls towards 1."""
    means = "ratios are not meaningful for calls that take little longer"
    return ok("an empty launch", f"{time_us:.2g} µs: {means}")


def launches(holds: bool) -> Finding:
    """Judge whether a stream can be held, so that the GPU never waits for the host."""
    check = "launches"
    if holds:
        return ok(check, "return before their kernel has ended")
    means = "The GPU waits for the host in every sample, so every row is marked `host late`."
    do = "Unset CUDA_LAUNCH_BLOCKING, and do not measure under a profiler."
    return warning(check, "return only after their kernel has ended", means, do)


def agreement(times_us: Mapping[str, float], empty_launch_us: float) -> Finding:
    """Compare one op's time by several clocks with the replay of its graph.

    Durations of kernels are shorter by the cost of a pair of events: an empty launch.
    """
    graph_us = times_us["graph"]
    check = f"clocks, {graph_us:.3g} µs op"
    apart = {name: t / graph_us - 1 for name, t in times_us.items() if name != "graph"}
    reading = f"graph {graph_us:.4g} µs; " + ", ".join(
        f"{name} {times_us[name]:.4g} µs ({100 * part:+.1f} %)" for name, part in apart.items()
    )
    if "CUPTI" not in apart:
        reading += "; CUPTI reports nothing here"
    if graph_us < LONG_US or all(
        abs(part) <= DISAGREE + (empty_launch_us / graph_us if name == "CUPTI" else 0)
        for name, part in apart.items()
    ):
        return ok(check, reading)
    means = "One of the clocks is wrong, or the call waits for its host."
    return warning(check, reading, means, "Trust no time until you know which one.")


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


def _by_events(call: Callable[[], object], device: torch.device) -> list[float]:
    """Return the µs of CALLS hot calls: too few for a power limit to slow the clock."""
    marks = []
    torch.cuda.synchronize(device)
    for _ in range(CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize(device)
    return [1e3 * begin.elapsed_time(end) for begin, end in marks]


def _by_cupti(replay: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return the median µs of the same replays by events and by their kernels' durations.

    Other calls could run at another GPU clock.
    """
    activities = [ProfilerActivity.CUDA]
    for _ in range(2):  # the first starts CUPTI
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            times_us = {"graph": median(_by_events(replay, device))}
    kernels = [event for event in profile.events() if event.device_type.name == "CUDA"]
    spans = sorted((kernel.time_range.start, kernel.time_range.elapsed_us()) for kernel in kernels)
    each, rest = divmod(len(spans), CALLS)
    if rest or not each:
        return times_us
    by_call = np.reshape([took_us for _, took_us in spans], (CALLS, each))
    return times_us | {"CUPTI": float(np.median(by_call.sum(1)))}
