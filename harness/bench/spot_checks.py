"""Check that the timed calls do the work: inspect some of them, and many calls before them.

    burst   before timing: up to CALLS calls, on activations A and B in turn, each inspected
    spot    in a quarter of the rounds, one more call among the timed samples, at a random place: on
            A like the samples, or on B, written just before it, with A written again after it. Its
            time is in no row

The right sums on B are those of an earlier call whose output was compared in full or in part. The
right sums on A are those of the first call of the burst: they must differ from B's, and a second
call must give them again after the output's elements were reversed. Each call finds the answer for
the other activations in its output buffer, so a call that does nothing, or returns a stored result,
is wrong. Writing the activations changes no version counter of torch. A spot is called by the same
line of code as a sample, with the same arguments.

An inspection sums the output's rows and columns on the stream behind the call, without waiting, in
fp64: in fp32, squares of sums of 1e-30 would be zero, and sums of 1e38 infinite. The sums may be 4
times as far from the right ones as those of the call that was compared in full, plus one eps of the
dtype. In a chain, every layer's output is inspected, and the furthest one counts.
"""

from collections.abc import Callable, Sequence
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
FEWEST = 16  # two outputs with so many sums never have the same ones by chance
CLOCK_EVERY = 8  # calls between two readings of the clock
SHARE = 0.25  # fraction of the rounds
FURTHER = 4.0  # times as far as the call that was compared in full
A, B = "a", "b"

Outputs = Output | tuple[Output, ...]
"""What a call returns: an output, or the outputs of all layers of a chain."""


@dataclass(frozen=True)
class Fingerprint:
    """The sums of each right output's rows and columns, and the largest distance from them."""

    sums: Tensor  # fp64 [outputs, rows + columns]
    sizes: Tensor  # norms [outputs]
    limit: float

    def around(self, out: Outputs) -> "Fingerprint":
        """Return the fingerprint of an output that was compared in part, with the same limit."""
        sums, values = sums_of(out), map(values_of, as_tuple(out))
        assert sums is not None
        sizes = [float(x.norm(dtype=torch.float64)) for x in values if isinstance(x, Tensor)]
        return replace(self, sums=sums, sizes=sums.new_tensor(sizes))

    def distance(self, out: object) -> Tensor | float:
        """Return the largest relative distance of an output, or infinity if it has no such sums."""
        sums = sums_of(out)
        if sums is None or sums.shape != self.sums.shape or sums.device != self.sums.device:
            return float("inf")
        furthest: Tensor = ((sums - self.sums).norm(dim=1) / self.sizes).max()
        return furthest


def values_of(out: object) -> object:
    """Return an output's elements: itself, or the values of a packed one."""
    return out.arrays().get("values") if isinstance(out, Format) else out


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def sums_of(out: object) -> Tensor | None:
    """Return the sums [outputs, rows + columns]; None unless all are tensors of one size."""
    sums = []
    for values in map(values_of, as_tuple(out)):
        if type(values) is not Tensor or not values.numel():
            return None
        table = values.detach().reshape(len(values), -1)
        sums.append(torch.cat([table.sum(dim, dtype=torch.float64) for dim in (1, 0)]))
    return torch.stack(sums) if len({s.shape for s in sums}) == 1 else None


def fingerprint_of(references: Sequence[Tensor], out: Outputs) -> Fingerprint | None:
    """Return the fingerprint of the right answers [fp64], to which `out` was compared in full."""
    right, sums = sums_of(tuple(references)), sums_of(out)
    sizes = [float(reference.norm()) for reference in references]
    if right is None or sums is None or not all(sizes):
        return None
    result = Fingerprint(right, sums.new_tensor(sizes), 0.0)
    values = values_of(as_tuple(out)[0])
    assert isinstance(values, Tensor)
    limit = FURTHER * float(result.distance(out)) + eps_of(values.dtype)
    return replace(result, limit=limit)


def reverse(out: object) -> None:
    """Reverse the elements of each output: wrong values that look plausible."""
    for values in map(values_of, as_tuple(out)):
        if type(values) is Tensor:
            values.copy_(values.detach().reshape(-1).flip(0).view_as(values))


@dataclass
class SpotChecks:
    """The spot checks of one call: its right sums on draws A and B, and the distances from them."""

    draws: Draws
    fingerprints: dict[str, Fingerprint] = field(default_factory=dict)
    distances: list[Tensor | float] = field(default_factory=list)
    random: SystemRandom = field(default_factory=SystemRandom)

    def turns(self, rounds: int, per_round: int) -> list[list[str]]:
        """Return the calls of each round: samples (""), and spots on A or on B."""
        turns = [[""] * per_round for _ in range(rounds)]
        if A in self.fingerprints:
            chosen = self.random.sample(range(rounds), max(1, int(SHARE * rounds)))
            for count, at in enumerate(chosen):  # a stale answer is right on A, so one is on B
                place = self.random.randrange(per_round + 1)
                turns[at].insert(place, self.random.choice((A, B)) if count else B)
        return turns

    def inspect(self, which: str, out: object) -> None:
        """Measure the distance of a call's output, and write A again."""
        self.distances.append(self.fingerprints[which].distance(out))
        self.draws.write(A)

    def burst(self, call: Callable[[], Outputs], wait: Callable[[], None]) -> None:
        of_b = self.fingerprints.get(B)
        if of_b is None:
            return
        distances, write = self.distances, self.draws.write
        write(A)
        out = call()
        sums, from_b = sums_of(out), of_b.distance(out)
        if sums is None or (sums.shape[1] >= FEWEST and float(from_b) <= of_b.limit):
            distances.append(float("inf"))  # no output, or still that of B
            return
        self.fingerprints[A] = of_a = replace(of_b, sums=sums)
        reverse(out)
        del out
        distances.append(of_a.distance(call()))
        began = perf_counter()
        for count in range(CALLS):
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
        limit = self.fingerprints[B].limit if B in self.fingerprints else 0.0
        wrong = [d for d in distances if not d <= limit]
        if not wrong:
            return None
        how = f"sums {wrong[0]:.2g} from the right ones, at most {limit:.2g} expected"
        return f"{len(wrong)} of {len(distances)} inspected calls are wrong: {how}"
