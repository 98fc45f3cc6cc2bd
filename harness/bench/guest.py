"""The process of code from outside the package: it prepares, calls and times, and judges nothing.

    < {"imported": true}
    > ["cuda:0", ...]                the device, and sys.path
    > {"do": "convert", ...}         a request: a method of Guest and its arguments
    < {"result": ...}                or {"ended": [status, reason, traceback]}

The judge (guest_contest.py) writes activations into sets of an arena that both share. For each call
the guest copies a set into the activations that the launch reads, and the output into the set:

    write set 0, call, keep output 0,  write set 1, call, keep output 1, ...

    burst   these calls back to back, on a GPU in one CUDA graph, if the launch can be captured
    turn    the same calls, each timed as the samples of the package's kernels are (timing.py)

A contender can change all of this, since its code runs here. So the judge believes no answer: it
compares the outputs, and its own clock measures bursts. What a kernel prints goes to stderr.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.harness.bench.arena import Layout, open_arena
from sparsebench.harness.bench.contest_state import end_status, synchronize, traceback_of
from sparsebench.harness.bench.correctness import form_of
from sparsebench.harness.bench.energy import facts_under_load
from sparsebench.harness.bench.operands import ChainLayer, DenseOperands, of_layer
from sparsebench.harness.bench.output_checks import poison_outputs
from sparsebench.harness.bench.prepare import (
    added_memory,
    operands_of,
    prepare,
    prepare_layer,
    unsupported,
    weights_in_format,
)
from sparsebench.harness.bench.sampling import CHAIN, call_of
from sparsebench.harness.bench.spot_checks import Outputs, as_tuple, values_of
from sparsebench.harness.bench.stages import Stages
from sparsebench.harness.bench.tampering import TamperingError, arrays_of
from sparsebench.harness.bench.timing import Chain, Clock, TimedCall, clock_of, launches_of, ready
from sparsebench.harness.catalog import load_op
from sparsebench.harness.machine.child_process import answer_parent
from sparsebench.kernels._common.capture import capturing
from sparsebench.kernels._kernel import Launch
from sparsebench.results.record import Contender, Problem, Status

EXACT = "exact"  # the launch on integers (exact_draws.py), beside the scopes
TIMED_HERE = "wake", "burst"  # requests that the judge times, of which a check would take a third
Sets = Sequence[tuple[Mapping[str, Tensor], Sequence[Tensor]]]
"""Activations and outputs of each set of a launch or a chain."""


class Burst:
    """Calls on sets, back to back; the judge measures what writing and keeping alone take."""

    def __init__(
        self, call: Callable[[], Outputs], activations: Mapping[str, Tensor], sets: Sets
    ) -> None:
        self._call, self._activations, self._sets = call, activations, sets

    def write(self, number: str) -> None:
        for name, values in self._sets[int(number)][0].items():
            self._activations[name].data.copy_(values)  # changes no version counter of torch

    def inspect(self, number: str, out: Outputs) -> None:
        """Keep an output where the judge reads it, if it has the form of one."""
        for each, kept in zip(as_tuple(out), self._sets[int(number)][1], strict=True):
            values = values_of(each)
            if type(values) is not Tensor or not values.is_contiguous():
                continue  # copying is not timed, and must not be work
            if (values.shape, values.dtype) == (kept.shape, kept.dtype):
                kept.copy_(values)

    def run(self, count: int) -> Outputs | None:
        """Call once on each of the first sets, and return the last output."""
        out: Outputs | None = None
        for number in map(str, range(count)):
            self.write(number)
            out = self._call()
            self.inspect(number, out)
        return out

    def capture(self, count: int) -> Callable[[], Any]:
        """Return a function that does the same by one CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            out = self.run(count)

        def replay(_output: Any = out) -> None:
            graph.replay()

        return replay


class Guest:
    """The contenders of a contest in this process: the yardstick, if there is one, and a guest."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stages = device, Stages(device)
        self._patterns: dict[int, Format] = {}
        self._weights: dict[int, dict[str, Format]] = {}
        self._works: dict[tuple[int, str], Launch | Chain] = {}
        self._timed: dict[tuple[int, str], TimedCall] = {}

    def open(
        self,
        problem: Mapping[str, Any],
        contenders: Sequence[Mapping[str, Any]],
        handle: Mapping[str, Any],
        layout: Layout,
    ) -> str | None:
        """Take the operands, and return why the guest cannot run the problem, or None."""
        self.problem, self.op = Problem.from_json(problem), load_op(problem["op"])
        self.contenders = [Contender(**contender) for contender in contenders]
        self._arrays = open_arena(handle, layout)
        return unsupported(self.problem, self.contenders[-1], self.device)

    def convert(self, number: int) -> int:
        """Convert the weights, and return their bytes."""
        contender = self.contenders[number]
        weights = dict(weights_in_format(self._layer(""), contender))
        synchronize(self.device)
        self.stages.guard.watch(arrays_of(weights, contender.format), held=False)
        stored = sum(weight.stored_bytes for weight in weights.values())
        if self.op.pattern:
            pattern = weights.pop(self.op.pattern)
            if contender.format != "dense":
                self._patterns[number] = pattern
        self._weights[number] = weights
        return stored

    def prepare(self, number: int, pinned: Any, timed: Any) -> dict[str, Any]:
        """Let the kernel prepare; return the facts for its row, and the form of its output."""
        contender, pattern = self.contenders[number], self._patterns.get(number)
        with added_memory(self.device) as memory:
            operands = operands_of(
                self._layer(""), self._weights[number], pinned, pattern=pattern, timed=timed
            )
            launch, facts = prepare(operands, contender)
        self._works[number, "kernel"] = launch
        return {**facts, **memory, "form": form_of(values_of(launch()))}

    def further(self, number: int, choice: Any, layers: Sequence[str], scope: str) -> None:
        """Prepare the layers of a chain, or the launch on integers."""
        each = [
            prepare_layer(self._layer(name), self.contenders[number], choice) for name in layers
        ]
        first = self._works[number, "kernel"]
        assert isinstance(first, Launch)
        self._works[number, scope] = Chain((first, *each)) if scope == CHAIN else each[0]

    def share(self, handle: Mapping[str, Any], layout: Layout, count: int) -> None:
        """Take the sets, and write where a packed output stores which element (0: padding)."""
        self._arrays |= open_arena(handle, layout)
        self._count, number = count, len(self.contenders) - 1
        if pattern := self._patterns.get(number):
            places = torch.arange(1.0, 1 + pattern.shape[0] * pattern.shape[1], dtype=torch.float64)
            stored = pattern.sample(places.view(pattern.shape).to(self.device))
            self._arrays["positions"].copy_(stored.arrays()["values"].reshape(-1))

    def capture(self) -> dict[str, list[str]]:
        """Make the calls ready to be timed; return the guest's clocks, and why not a graph."""
        for (number, scope), work in self._works.items():
            if scope != EXACT:
                self._timed[number, scope] = ready(work, self.device)
        guest = len(self.contenders) - 1
        return {s: [c.clock, c.why] for (n, s), c in self._timed.items() if n == guest}

    def wake(self) -> None:
        """Let the GPU turn from the judge's process to this one, which takes it milliseconds."""
        torch.zeros(1, device=self.device)
        synchronize(self.device)

    def burst(self, number: int, scope: str, count: int, fill: bool = False) -> int:
        """Call once on each of the first sets; return how many values the last call lost.

        With `fill`, overwrite the output of an earlier call first: a launch with a buffer of its
        own finds NaN there.
        """
        work = self._works[number, scope]
        if fill:
            poison_outputs(work.run)
        timed = self._timed.get((number, scope))
        self._whole_burst(number, scope, count, timed is not None and timed.clock == "graph")()
        synchronize(self.device)
        return sum(launch.lost() for launch in launches_of(work) if launch.lost)

    def turn(self, number: int, scope: str, cache: str, count: int) -> list[tuple[float, bool]]:
        """Call once on each of the first sets; return the times in µs, and whether one is late."""
        which = number, call_of(scope)
        timed = self._timed[which].in_scope(scope, self._works[which].run)
        each = replace(timed, spots=self._burst(*which))
        take = self._clock(scope, cache)
        return [(s.time_us, s.late) for s in take([(0, each, str(j)) for j in range(count)])]

    def energy(self, number: int) -> dict[str, Any]:
        return facts_under_load(self._timed[number, "kernel"].call, self.device)

    def _layer(self, name: str) -> ChainLayer:
        """Return the operands of a layer, of which this process needs no more."""
        weights, activations = (
            {n: self._arrays[n + name] for n in names}
            for names in (self.op.weights, self.op.activations)
        )
        return ChainLayer(self.problem, DenseOperands(weights, activations, {}, {}, 0.0, ""), name)

    @cache  # noqa: B019 (this process has one Guest)
    def _clock(self, scope: str, state: str) -> Clock:
        return clock_of(self.device, scope, state)

    @cache  # noqa: B019
    def _burst(self, number: int, scope: str) -> Burst:
        work = self._works[number, scope]
        names = [of_layer(i) for i in range(len(launches_of(work)))]
        x, sets = sets_of(self._arrays, self.op.activations, names, self._count)
        exact = scope == EXACT  # a further launch, with activations of its own
        return Burst(work.run, self._layer(f" {EXACT}").dense.activations if exact else x, sets)

    @cache  # noqa: B019
    def _whole_burst(
        self, number: int, scope: str, count: int, captures: bool
    ) -> Callable[[], Any]:
        burst = self._burst(number, scope)
        return burst.capture(count) if captures else lambda: burst.run(count)


def sets_of(
    arrays: Mapping[str, Tensor], activations: Sequence[str], layers: Sequence[str], count: int
) -> tuple[dict[str, Tensor], Sets]:
    """Return the activations that launches read, and the sets, from the arrays of an arena."""
    names = [f"{name}{layer}" for layer in layers for name in activations]
    sets = [
        (
            {n: arrays[f"{n} in set {j}"] for n in names},
            [arrays[f"output{layer} in set {j}"] for layer in layers],
        )
        for j in range(count)
    ]
    return {name: arrays[name] for name in names}, sets


def main() -> None:
    """Answer requests until stdin closes."""
    send = answer_parent()
    send({"imported": True})
    name, *path = json.loads(sys.stdin.readline() or "[null]")
    if not name:
        return  # the judge has ended
    sys.path[:] = path
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    guest = Guest(device)
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        try:
            result = getattr(guest, what)(**request)
            if what not in TIMED_HERE:
                guest.stages.verify()
            send({"result": result})
        except TamperingError as error:
            send({"ended": [Status.WRONG, f"{what}: {error}", ""]})
        except Exception as error:
            status, reason = end_status(error)
            reason = f"{what}: {reason}" if status is Status.FAILED else reason
            send({"ended": [status, reason, traceback_of(error)]})
    os._exit(0)


if __name__ == "__main__":
    main()
