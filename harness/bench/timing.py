"""Time all contenders of a problem together, in rounds.

    round 1    C C C C  A A A A  B B B B        a round is a few samples of each contender in turn,
    round 2    B B B B  C C C C  A A A A        in a new random order; drift affects all alike
    ...

    scope    kernel  device time: two CUDA events around one replay of the launch's CUDA graph (or
                     around the launch, if it cannot be captured). The stream is held until a turn
                     is enqueued, so no launch gap is included (kernels/_common/gpu_clock.py)
             op      time as called from Python: events around the call on an idle stream; the
                     host's time for the launch is included
             chain   device time of a layer inside a chain: LAYERS layers of one shape, one after
                     the other in one CUDA graph; its time is divided by LAYERS
    cache    cold    the L2 cache is flushed before each sample (kernels/_common/gpu_clock.py)
             hot     the call itself runs before each sample

The layers of a chain differ only in their seed. Each has weights, activations and an output of its
own, so no layer finds in the L2 cache what another one read. None reads what another wrote, because
Y is not as wide as X. A launch that cannot be captured has no chain.

If the host is late, the round is repeated, up to REPEATS times, and MOST_REPEATS times in all.
`late` is the share of a contender's samples that stay late; such a row is marked
(results/tables/frame.py). A call that cannot be captured runs on a stream that is not held and is
often late, so a round is not repeated if only such calls are late.

A call that waits for the device itself, as a server does, may also read times of its own
(`Launch.readings`): each is a further scope, with a sample from each call that is timed.

On a CPU the host clock measures one call; scope and cache make no difference.

Spot checks (spot_checks.py) are further calls among the samples, made in the same way and then
inspected; their times are not samples. A guest's calls (guest.py) are all made in this way, and are
samples. sampling.py has the number of samples.
"""

import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

import torch

from sparsebench.harness.bench.sampling import ROUNDS, sample_budget
from sparsebench.harness.bench.spot_checks import Outputs
from sparsebench.kernels._common.capture import capturing
from sparsebench.kernels._common.gpu_clock import GpuClock, flusher
from sparsebench.kernels._kernel import Launch, Output

REPEATS, MOST_REPEATS = 2, 24  # most repeats of a round, and of all rounds together


def samples_alone(rounds: int, per_round: int) -> list[list[str]]:
    """Return the calls of each round, all of which are samples ("")."""
    return [[""] * per_round] * rounds


class Inspection(Protocol):
    """What happens to a call beside its time."""

    def write(self, which: str, /) -> None:
        """Write activations before the call."""

    def inspect(self, which: str, out: Outputs, /) -> None:
        """Take the output after it."""


@dataclass(frozen=True)
class TimedCall:
    """A launch ready to be timed.

    clock  host, events or graph
    why    why it is not captured on a GPU
    spots  made among its samples; None for a call that is only timed
    readings  what the last call read itself (Launch.readings); they are kept with its time
    turns  the calls of each round, from the numbers of rounds and of samples per round: "" for a
           sample, or the activations of a spot check
    """

    call: Callable[[], Outputs]
    clock: str
    why: str = ""
    spots: Inspection | None = None
    turns: Callable[[int, int], list[list[str]]] = samples_alone
    readings: Callable[[], Mapping[str, float]] = dict

    def in_scope(self, scope: str, run: Callable[[], Outputs]) -> Self:
        """Return what a scope times: in scope op, `run` called from Python."""
        if scope != "op" or self.clock == "host":
            return self
        return replace(self, call=run, clock="events", why="")


@dataclass(frozen=True)
class Chain:
    """The launches of layers that follow each other."""

    launches: tuple[Launch, ...]

    def run(self) -> tuple[Output, ...]:
        return tuple(launch.run() for launch in self.launches)


def launches_of(work: Launch | Chain) -> tuple[Launch, ...]:
    return work.launches if isinstance(work, Chain) else (work,)


@dataclass(frozen=True)
class Samples:
    """One contender's times in the order taken, `per_round` at a time.

    late      see above; None on a CPU and in scope op, whose samples include the host's time
    readings  of each sample
    """

    times_us: tuple[float, ...]
    per_round: int
    late: float | None
    readings: tuple[Mapping[str, float], ...] = ()

    @property
    def plan(self) -> tuple[int, int]:
        """Return the number of rounds, and of samples in each."""
        return len(self.times_us) // self.per_round, self.per_round

    @property
    def has_readings(self) -> bool:
        return any(self.readings)

    def of(self, reading: str) -> "Samples":
        """Return what the calls read themselves: once, if it is read once in a process."""
        times = dict.fromkeys(round(of_sample[reading], 3) for of_sample in self.readings)
        return Samples(tuple(times), self.per_round, None)

    def per_layer(self, layers: int) -> "Samples":
        return replace(self, times_us=tuple(round(us / layers, 3) for us in self.times_us))


def ready(launch: Launch | Chain, device: torch.device) -> TimedCall:
    """Capture the launch as a CUDA graph if possible; `clock` says whether it was.

    The timed call is `launch.run`, without the test for a running capture, which takes 0.2 µs.
    """
    readings = launch.readings if isinstance(launch, Launch) and launch.readings else dict
    if device.type == "cpu":
        return TimedCall(launch.run, "host", readings=readings)
    if readings is not dict:
        return TimedCall(launch.run, "events", "no CUDA graph: the call waits", readings=readings)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    try:
        with capturing(graph):
            output = launch.run()
    except RuntimeError as error:
        torch.cuda.set_stream(stream)  # a capture that fails at its end leaves its own stream
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
    clock: "Clock | None" = None,
) -> list[Samples]:
    """Return each contender's samples. With `announce`, announce each sample and wait for it.

    Another `clock` than the device's is that of the guest process that makes the calls.
    """
    take = clock or clock_of(device, scope, cache, announce)
    numbered = [(i, contender, "") for i, contender in enumerate(contenders)]
    trials = [take(numbered) for _ in range(2)]  # the first call may include warm-up
    plans = [sample_budget(min(t.time_us for t in times)) for times in zip(*trials, strict=True)]
    draw = random.Random(f"{seed} {scope} {cache}")
    turns = [who.turns(*plan) for who, plan in zip(contenders, plans, strict=True)]
    samples: list[list[TimedSample]] = [[] for _ in contenders]
    repeats = MOST_REPEATS
    for number in range(ROUNDS):
        turn = [i for i, (rounds, _) in enumerate(plans) if number < rounds]
        draw.shuffle(turn)
        order = [(i, contenders[i], spot) for i in turn for spot in turns[i][number]]
        taken = take(order)
        for _ in range(min(REPEATS, repeats)):
            if not any(
                s.late and not s.spot and contenders[s.contender].clock == "graph" for s in taken
            ):
                break
            taken, repeats = take(order), repeats - 1
        for sample in taken:
            if not sample.spot:
                samples[sample.contender].append(sample)
    counts_late = device.type == "cuda" and scope != "op"
    return [
        Samples(
            tuple(round(sample.time_us, 3) for sample in timed),
            per_round,
            sum(sample.late for sample in timed) / len(timed) if counts_late else None,
            tuple(sample.readings for sample in timed),
        )
        for timed, (_, per_round) in zip(samples, plans, strict=True)
    ]


Order = list[tuple[int, TimedCall, str]]
"""The calls of a round: number, contender, and for a spot check its activations (A or B)."""


class TimedSample(NamedTuple):
    """A sample of a contender, by its number; `late` if the GPU may have waited for the host."""

    contender: int
    time_us: float
    late: bool
    spot: str = ""
    readings: Mapping[str, float] = MappingProxyType({})


Clock = Callable[[Order], list[TimedSample]]


def clock_of(
    device: torch.device, scope: str, state: str, announce: Callable[[int], None] | None = None
) -> Clock:
    """Return the clock of a device for a scope and a state of the cache."""
    if device.type == "cpu":
        return host_rounds(announce)
    return gpu_rounds(device, announce, idle=scope == "op", cold=state == "cold")


def host_rounds(announce: Callable[[int], None] | None) -> Clock:
    def take(order: Order) -> list[TimedSample]:
        times = []
        for i, contender, spot in order:
            if announce:
                announce(i)
            outputs: list[Outputs] = []
            if spot and contender.spots:
                contender.spots.write(spot)
            keep = outputs.append if spot else id  # a call into C either way
            # One call into C: a contender finds no start time in the frames of its callers.
            calls: tuple[Callable[[], Any], ...] = perf_counter, contender.call, perf_counter
            start, out, end = map(operator.call, calls)
            keep(out)
            del out
            time_us = 1e6 * (end - start)
            if spot and contender.spots:
                contender.spots.inspect(spot, outputs.pop())
            times.append(TimedSample(i, time_us, False, spot, contender.readings()))
        return times

    return take


def gpu_rounds(
    device: torch.device,
    announce: Callable[[int], None] | None,
    *,
    idle: bool,
    cold: bool,
) -> Clock:
    """Enqueue a whole round, a contender's samples under one hold, then read the events.

    An `idle` stream is not held, because its samples include the host's time for the launch.
    """
    flush, clock = flusher(device), GpuClock(device)
    wait = idle or announce is not None

    def take(order: Order) -> list[TimedSample]:
        samples = []
        turns = [[*turn] for _, turn in groupby(order, itemgetter(0))]
        for turn in [[call] for call in order] if wait else turns:
            if announce:
                announce(turn[0][0])
            with clock.hold(not idle and turn[0][1].clock == "graph"):
                for i, contender, spot in turn:
                    outputs: list[Outputs] = []
                    keep = outputs.append if spot else id
                    if not cold:
                        contender.call()
                    if spot and contender.spots:
                        contender.spots.write(spot)
                    if cold:
                        flush()
                    if idle:
                        torch.cuda.synchronize(device)
                    sample = clock.sample(contender.call, keep)
                    if spot and contender.spots:
                        contender.spots.inspect(spot, outputs.pop())
                    samples.append((i, sample, spot, contender.readings()))
            if wait:
                torch.cuda.synchronize(device)
        torch.cuda.synchronize(device)
        return [
            TimedSample(i, s.time_us, s.late and not idle, spot, readings)
            for i, s, spot, readings in samples
        ]

    return take
