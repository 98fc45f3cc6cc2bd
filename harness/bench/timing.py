"""Clocks: time all contenders of a problem together.

    block 1    C C C C  A A A A  B B B B        a block is a few samples of each contender in turn,
    block 2    B B B B  C C C C  A A A A        in a new random order; drift affects all alike
    ...

    scope    kernel  device time: two CUDA events around one replay of the launch's CUDA graph (or
                     around the launch, if it cannot be captured), queued behind other work, so that
                     no launch gap is included
             op      time as called from Python: events around the call on an idle stream; the
                     host's time for the launch is included
             chain   device time of a layer inside a chain: LAYERS layers of one shape, one after
                     the other in one CUDA graph; its time is divided by LAYERS
    cache    cold    the L2 cache is flushed before each sample (kernels/_common/l2_flush.py)
             hot     the call itself runs before each sample; each block is queued behind flushes,
                     because a short call ends before the host has launched the next one

The layers of a chain differ only in their seed. Each has weights, activations and an output of its
own, so no layer finds in the L2 cache what another one read. None reads what another wrote, because
Y is not as wide as X. A launch that cannot be captured has no chain.

On a CPU the host clock measures one call; scope and cache make no difference.

Spot checks (spot_checks.py) are further calls among the samples, made in the same way and then
inspected; their times are not samples. sampling.py has the number of samples.
"""

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from sparsebench.harness.bench.sampling import BLOCKS, budgeted
from sparsebench.harness.bench.spot_checks import Outputs, Spots
from sparsebench.kernels._common.capture import capturing
from sparsebench.kernels._common.l2_flush import flusher
from sparsebench.kernels._kernel import Launch, Output

SPOT_FLUSHES = 12  # 27 µs each on an H200: time to enqueue a spot, where a block is queued up


@dataclass(frozen=True)
class TimedCall:
    """A launch ready to be timed; `why` says why it is not captured on a GPU."""

    call: Callable[[], Outputs]
    clock: str  # host, events or graph
    why: str = ""


@dataclass(frozen=True)
class Chain:
    """The launches of layers that follow each other."""

    launches: tuple[Launch, ...]

    def run(self) -> tuple[Output, ...]:
        """Enqueue the launches in turn, and return all outputs."""
        return tuple(launch.run() for launch in self.launches)


@dataclass(frozen=True)
class Samples:
    """One contender's times in the order taken, `per_block` at a time."""

    times_us: tuple[float, ...]
    per_block: int

    def per_layer(self, layers: int) -> "Samples":
        return Samples(tuple(round(us / layers, 3) for us in self.times_us), self.per_block)


def ready(launch: Launch | Chain, device: torch.device) -> TimedCall:
    """Capture the launch as a CUDA graph if possible; `clock` says whether it was.

    The timed call is `launch.run`, without the test for a running capture, which takes 0.2 µs.
    """
    if device.type == "cpu":
        return TimedCall(launch.run, "host")
    graph = torch.cuda.CUDAGraph()
    try:
        with capturing(graph):
            output = launch.run()
    except RuntimeError as error:
        torch.cuda.synchronize(device)
        why = str(error).strip().partition("\n")[0]
        return TimedCall(launch.run, "events", f"no CUDA graph: {why}")

    def replay(_owner: Launch | Chain = launch) -> Outputs:  # keeps alive what the graph reads
        graph.replay()
        return output

    return TimedCall(replay, "graph")


def time_together(
    contenders: Sequence[TimedCall],
    device: torch.device,
    seed: str,
    announce: Callable[[int], None] | None = None,
    *,
    scope: str = "kernel",
    cache: str = "cold",
    spots: Spots | None = None,
) -> list[Samples]:
    """Return each contender's samples. With `announce`, announce each sample and wait for it."""
    if device.type == "cuda":
        take = _gpu_clock(device, announce, spots, idle=scope == "op", cold=cache == "cold")
    else:
        take = _host_clock(announce, spots)
    numbered = [(i, contender, "") for i, contender in enumerate(contenders)]
    trials = [take(numbered) for _ in range(2)]  # the first call may include warm-up
    plans = [budgeted(min(t for _, t in times)) for times in zip(*trials, strict=True)]
    draw = random.Random(f"{seed} {scope} {cache}")
    turns = [
        spots.turns(i, *plan) if spots else [[""] * plan[1]] * plan[0]
        for i, plan in enumerate(plans)
    ]
    samples: list[list[float]] = [[] for _ in contenders]
    for block in range(BLOCKS):
        turn = [i for i, (blocks, _) in enumerate(plans) if block < blocks]
        draw.shuffle(turn)
        order = [(i, contenders[i], spot) for i in turn for spot in turns[i][block]]
        for i, time_us in take(order):
            samples[i].append(round(time_us, 3))
    return [Samples(tuple(s), plan[1]) for s, plan in zip(samples, plans, strict=True)]


Order = list[tuple[int, TimedCall, str]]
"""The calls of a block: number, contender, and for a spot check its activations (A or B)."""

Clock = Callable[[Order], list[tuple[int, float]]]


def _host_clock(announce: Callable[[int], None] | None, spots: Spots | None) -> Clock:
    def take(order: Order) -> list[tuple[int, float]]:
        times = []
        for i, contender, spot in order:
            if announce:
                announce(i)
            outputs: list[Outputs] = []
            if spot and spots:
                spots.write(spot)
            keep = outputs.append if spot else id  # a call into C either way
            # One call into C: a contender finds no start time in the frames of its callers.
            calls: tuple[Callable[[], Any], ...] = perf_counter, contender.call, perf_counter
            start, out, end = map(operator.call, calls)
            keep(out)
            del out
            time_us = 1e6 * (end - start)
            if spot and spots:
                spots.inspect(i, spot, outputs.pop())
            else:
                times.append((i, time_us))
        return times

    return take


def _gpu_clock(
    device: torch.device,
    announce: Callable[[int], None] | None,
    spots: Spots | None,
    *,
    idle: bool,
    cold: bool,
) -> Clock:
    """Enqueue a whole block, then read its events, so that the GPU never waits for the host.

    On an `idle` stream the GPU does wait: the host's time for the launch belongs to the sample.
    """
    flush = flusher(device)
    wait = idle or announce is not None

    def take(order: Order) -> list[tuple[int, float]]:
        marks = []
        if not cold:
            for _, _, spot in order:
                for _ in range(1 + SPOT_FLUSHES * bool(spot)):
                    flush()
        for i, contender, spot in order:
            if announce:
                announce(i)
            outputs: list[Outputs] = []
            keep = outputs.append if spot else id
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if not cold:
                contender.call()
            if spot and spots:
                spots.write(spot)
            if cold:
                flush()
            if idle:
                torch.cuda.synchronize(device)
            begin.record()
            keep(contender.call())
            end.record()
            if spot and spots:
                spots.inspect(i, spot, outputs.pop())
            else:
                marks.append((i, begin, end))
            if wait:
                torch.cuda.synchronize(device)
        torch.cuda.synchronize(device)
        return [(i, 1e3 * begin.elapsed_time(end)) for i, begin, end in marks]

    return take
