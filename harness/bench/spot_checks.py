"""Check that the timed calls do the work: inspect some of them, and many calls before them.

    burst   before timing: up to CALLS calls, on activations A and B in turn, each inspected; only
            the first two, if these take more than BURST_S
    spot    in a quarter of the rounds, one more call among the timed samples, at a random place: on
            A like the samples, or on B, written just before it, with A written again after it. Its
            time is in no row

The right output on B is that of an earlier call, which was compared in full or in part. The right
output on A is that of the first call of the burst: it must differ from B's, and a second call must
give it again after the output's elements were reversed. Each call finds the answer for the other
activations in its output buffer, so a call that does nothing, or returns a stored result, is wrong.
Writing the activations changes no version counter of torch. A spot is called by the same line of
code as a sample, with the same arguments.

An inspection compares the output with the right one, on the stream behind the call and without
waiting: ||Y - R|| may be 4 times the error of the call that was compared in full, plus one eps of
the dtype. The sum of squares is fp64: in fp32, squares of 1e-30 would be zero. In a chain, every
layer's output is inspected, and the furthest one counts.

These are the checks of the package's own kernels. Code from outside the package runs in a process
of its own, gets other activations in every call, and is compared element by element
(guest_contest.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import SystemRandom
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.harness.bench.correctness import eps_of
from sparsebench.harness.bench.operands import Draws
from sparsebench.kernels._kernel import Output

CALLS = 64
BURST_S = 0.1
FEWEST = 16  # rows and columns: two such outputs are never equal by chance
CLOCK_EVERY = 8  # calls between two readings of the clock
SHARE = 0.25  # fraction of the rounds
FURTHER = 4.0  # times as far as the call that was compared in full
A, B = "a", "b"

Outputs = Output | tuple[Output, ...]
"""What a call returns: an output, or the outputs of all layers of a chain."""


@dataclass(frozen=True)
class RightOutputs:
    """The right outputs of a call, their norms, and the largest distance from them."""

    right: tuple[Tensor, ...]  # each [rows, columns]
    sizes: tuple[float, ...]
    limit: float

    def distance(self, out: object) -> Tensor | float:
        """Return the largest relative distance of an output, or infinity if it has no such form."""
        tables = tables_of(out)
        if tables is None or [t.shape for t in tables] != [t.shape for t in self.right]:
            return float("inf")
        each = zip(tables, self.right, self.sizes, strict=True)
        return torch.stack([_norm(_wide(y) - right) / size for y, right, size in each]).max()


def _norm(table: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(table, dtype=torch.float64)
    return norm


def _wide(table: Tensor) -> Tensor:
    return table if table.element_size() >= 4 else table.float()


def values_of(out: object) -> object:
    """Return an output's elements: itself, or the values of a packed one."""
    return out.arrays().get("values") if isinstance(out, Format) else out


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def tables_of(out: object) -> list[Tensor] | None:
    """Return each output's values [rows, columns]; None unless all are tensors."""
    every = [values_of(each) for each in as_tuple(out)]
    if not all(type(values) is Tensor and values.numel() for values in every):
        return None
    return [v.detach().reshape(len(v), -1) for v in every if isinstance(v, Tensor)]


def right_outputs(out: Outputs, error: float) -> RightOutputs | None:
    """Return outputs with this error as the right ones; None if there is nothing to compare."""
    tables = tuple(table.clone() for table in tables_of(out) or ())
    sizes = tuple(float(_norm(_wide(table))) for table in tables)
    if not tables or not all(sizes):
        return None
    return RightOutputs(tables, sizes, FURTHER * error + eps_of(tables[0].dtype))


def reverse(out: object) -> None:
    """Reverse the elements of each output: wrong values that look plausible."""
    for values in map(values_of, as_tuple(out)):
        if type(values) is Tensor:
            values.copy_(values.detach().reshape(-1).flip(0).view_as(values))


@dataclass
class SpotChecks:
    """The spot checks of one call: its right outputs on draws A and B, and distances from them."""

    draws: Draws
    right: dict[str, RightOutputs] = field(default_factory=dict)
    distances: list[Tensor | float] = field(default_factory=list)
    random: SystemRandom = field(default_factory=SystemRandom)

    def turns(self, rounds: int, per_round: int) -> list[list[str]]:
        """Return the calls of each round: samples (""), and spots on A or on B."""
        turns = [[""] * per_round for _ in range(rounds)]
        if A in self.right:
            chosen = self.random.sample(range(rounds), max(1, int(SHARE * rounds)))
            for count, at in enumerate(chosen):  # a stale answer is right on A, so one is on B
                place = self.random.randrange(per_round + 1)
                turns[at].insert(place, self.random.choice((A, B)) if count else B)
        return turns

    def write(self, which: str) -> None:
        """Write the activations of a spot."""
        self.draws.write(which)

    def inspect(self, which: str, out: object) -> None:
        """Measure the distance of a call's output, and write A again."""
        self.distances.append(self.right[which].distance(out))
        self.draws.write(A)

    def burst(self, call: Callable[[], Outputs], wait: Callable[[], None]) -> None:
        of_b = self.right.get(B)
        if of_b is None:
            return
        distances, write = self.distances, self.draws.write
        began = perf_counter()
        write(A)
        out = call()
        tables, from_b = tables_of(out), of_b.distance(out)
        if tables is None or (sum(tables[0].shape) >= FEWEST and float(from_b) <= of_b.limit):
            distances.append(float("inf"))  # no output, or still that of B
            return
        self.right[A] = of_a = replace(of_b, right=tuple(t.clone() for t in tables))
        reverse(out)
        del out
        distances.append(of_a.distance(call()))
        slow = perf_counter() - began > BURST_S  # a spot among the samples inspects B
        began = perf_counter()
        for count in range(0 if slow else CALLS):
            which, right = ((B, of_b), (A, of_a))[count % 2]
            write(which)
            distances.append(right.distance(call()))
            if count % CLOCK_EVERY == 1:
                wait()
                if perf_counter() - began > BURST_S:
                    break
        write(A)

    def verdict(self) -> str | None:
        """Return what was wrong with the calls inspected since the last verdict, or None."""
        distances, self.distances = [float(d) for d in self.distances], []
        limit = self.right[B].limit if B in self.right else 0.0
        wrong = [d for d in distances if not d <= limit]
        if not wrong:
            return None
        how = f"{wrong[0]:.2g} from the right output, at most {limit:.2g} expected"
        return f"{len(wrong)} of {len(distances)} inspected calls are wrong: {how}"
