"""Clocks: all contenders of a problem, timed together.

    block 1    C C C C  A A A A  B B B B        a block is a few samples of each contender in turn,
    block 2    B B B B  C C C C  A A A A        in an order drawn anew; what drifts moves all alike
    ...

    scope    kernel  device time: two CUDA events around one replay of the launch's CUDA graph (or
                     around the launch, where it cannot be captured), queued behind other work, so
                     that no launch gap is inside
             op      as called from Python: events around the call on an idle stream; what the host
                     needs to launch is inside
             chain   device time of a layer among others: LAYERS layers of one shape, one after the
                     other in one CUDA graph, and its time divided by LAYERS
    cache    cold    the L2 cache is flushed before each sample (kernels/_common/l2_flush.py)
             hot     the call itself runs before each sample; each block is queued up behind
                     flushes, since a short call is over before the host has launched the next

The layers of a chain differ in their seed alone. Each has weights, activations and an output of its
own, so no layer finds in the L2 cache what another one read. None reads what another wrote: Y is
not as wide as X. A launch that cannot be captured has no chain.

CPU: the host clock around one call, for which scope and cache make no difference.

Spots (spots.py) are calls among these, made in the same way and seen to be right. No sample is
theirs.

How many samples each takes is in samples.py.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from sparsebench.harness.bench.sampling import BLOCKS, budgeted
from sparsebench.harness.bench.spot_checks import Outputs, Spots
from sparsebench.kernels._common.capture import capturing
from sparsebench.kernels._common.l2_flush import flusher
from sparsebench.kernels._kernel import Launch, Output

SPOT_FLUSHES = 12  # 27 µs each on an H200: time to enqueue a spot, where a block is queued up


@dataclass(frozen=True)
class Timed:
    """A launch made ready: `call` does the work once; `why` it is not captured on a GPU."""

    call: Callable[[], Outputs]
    clock: str  # host, events or graph
    why: str = ""


@dataclass(frozen=True)
class Chain:
    """The launches of layers that follow each other."""

    launches: tuple[Launch, ...]

    def run(self) -> tuple[Output, ...]:
        """Enqueue them in turn, and return all outputs."""
        return tuple(launch.run() for launch in self.launches)


@dataclass(frozen=True)
class Samples:
    """One contender's times in the order taken, `per_block` at a time."""

    times_us: tuple[float, ...]
    per_block: int

    def of_a_layer(self, layers: int) -> "Samples":
        """Return the times of one of so many layers."""
        return Samples(tuple(round(us / layers, 3) for us in self.times_us), self.per_block)


def ready(launch: Launch | Chain, device: torch.device) -> Timed:
    """Capture the launch as a CUDA graph where that is possible; the clock's name says which.

    What is called is `launch.run`, without the look for a capture, which takes 0.2 µs.
    """
    if device.type == "cpu":
        return Timed(launch.run, "host")
    graph = torch.cuda.CUDAGraph()
    try:
        with capturing(graph):
            output = launch.run()
    except RuntimeError as error:
        torch.cuda.synchronize(device)
        why = str(error).strip().partition("\n")[0]
        return Timed(launch.run, "events", f"no CUDA graph: {why}")

    def replay(_owner: Launch | Chain = launch) -> Outputs:  # it owns what the graph reads
        graph.replay()
        return output

    return Timed(replay, "graph")


def time_together(
    contenders: Sequence[Timed],
    device: torch.device,
    seed: str,
    announce: Callable[[int], None] | None = None,
    *,
    scope: str = "kernel",
    cache: str = "cold",
    spots: Spots | None = None,
) -> list[Samples]:
    """Return each contender's samples. With `announce`, each sample is named and waited for."""
    if device.type == "cuda":
        take = _gpu_clock(device, announce, spots, idle=scope == "op", cold=cache == "cold")
    else:
        take = _host_clock(announce, spots)
    numbered = [(i, contender, "") for i, contender in enumerate(contenders)]
    trials = [take(numbered) for _ in range(2)]  # a first call may still warm something up
    plans = [budgeted(min(t for _, t in own)) for own in zip(*trials, strict=True)]
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


Order = list[tuple[int, Timed, str]]
"""Who is called, by number, and of a spot on which activations."""

Clock = Callable[[Order], list[tuple[int, float]]]


def _host_clock(announce: Callable[[int], None] | None, spots: Spots | None) -> Clock:
    def take(order: Order) -> list[tuple[int, float]]:
        times = []
        for i, contender, spot in order:
            if announce:
                announce(i)
            found: list[Outputs] = []
            if spot and spots:
                spots.write(spot)
            keep = found.append if spot else id  # a call into C either way
            start = perf_counter()
            keep(contender.call())
            time_us = 1e6 * (perf_counter() - start)
            if spot and spots:
                spots.see(i, spot, found.pop())
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
    """Enqueue a whole block, then read its events: the GPU never waits for the host inside it.

    On an `idle` stream it does, and is meant to: what the host does to launch is in the sample.
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
            found: list[Outputs] = []
            keep = found.append if spot else id
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
                spots.see(i, spot, found.pop())
            else:
                marks.append((i, begin, end))
            if wait:
                torch.cuda.synchronize(device)
        torch.cuda.synchronize(device)
        return [(i, 1e3 * begin.elapsed_time(end)) for i, begin, end in marks]

    return take
