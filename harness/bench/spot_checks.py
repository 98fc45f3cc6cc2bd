"""Is the work done in the calls that are timed? Some of them, and many before them, are looked at.

    burst   before timing: up to CALLS calls, on activations A and B in turn, each looked at
    spot    among the timed samples of a quarter of the blocks, one call more, at a random place: on
            A as the samples are, or on B, written just before it, and A again after it. No row has
            its time

B's answer is known: the call before was held against it in full. A's is that of the first call of
the burst. It is not B's, and is found again after its elements were put into the opposite order.
What a call finds in its output is the right answer for the other activations. So one that does
nothing, or returns what it kept, is wrong. Writing the activations moves no version counter of
torch. A spot is called on the same line of code as a sample, and is given nothing else.

    seen    the sums of the output's rows and columns, read on the stream behind the call, without
            waiting. They may be 4 times as far from the answer's as those of the call that was
            held against it in full, and one eps of the dtype. Of a chain, every layer's output is
            looked at, and the furthest counts
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import SystemRandom
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.kernels._kernel import Output

CALLS = 64
BURST_S = 0.1
FEWEST = 16  # sums of which two outputs never have the same by chance
LOOK_EVERY = 8  # calls between two looks at the clock
SHARE = 0.25  # of the blocks
FURTHER = 4.0  # times as far as the call that was checked
A, B = "a", "b"


Outputs = Output | tuple[Output, ...]
"""What a call returns: an output, or those of all layers of a chain."""


@dataclass(frozen=True)
class Print:
    """The sums of each output's rows and of its columns, and how far from them is right."""

    sums: Tensor  # fp32 [outputs, rows and columns]
    sizes: Tensor  # [outputs]
    limit: float

    def distance(self, out: object) -> Tensor | float:
        """Return how far the furthest output is, on its device; infinite where it is none."""
        sums = sums_of(out)
        if sums is None or sums.shape != self.sums.shape or sums.device != self.sums.device:
            return float("inf")
        furthest: Tensor = ((sums - self.sums).norm(dim=1) / self.sizes).max()
        return furthest


def values_of(out: object) -> object:
    """Return an output's elements: itself, or the values of a packed one."""
    return out.arrays().get("values") if isinstance(out, Format) else out


def each(outputs: Any) -> tuple[Any, ...]:
    """Return what a call returned, one by one."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def sums_of(out: object) -> Tensor | None:
    """Return the sums of the rows and of the columns of each output; None where one is no tensor.

    Outputs of a call are of one size.
    """
    sums = []
    for values in map(values_of, each(out)):
        if type(values) is not Tensor or not values.numel():
            return None
        table = values.detach().reshape(len(values), -1)
        wide = torch.promote_types(table.dtype, torch.float32)
        sums.append(torch.cat([table.sum(dim, dtype=wide) for dim in (1, 0)]))
    return torch.stack(sums) if len({s.shape for s in sums}) == 1 else None


def print_of(references: Sequence[Tensor], out: Outputs) -> Print | None:
    """Return the print of the right answers [fp64]; `out` was held against them in full."""
    sums, found = sums_of(tuple(references)), sums_of(out)
    sizes = [float(reference.norm()) for reference in references]
    if sums is None or found is None or not all(sizes):
        return None
    seen = Print(sums.to(found.dtype), found.new_tensor(sizes), 0.0)
    values = values_of(each(out)[0])
    assert isinstance(values, Tensor)
    return replace(seen, limit=FURTHER * float(seen.distance(out)) + torch.finfo(values.dtype).eps)


def turn_round(out: object) -> None:
    """Put the elements of each output into the opposite order: they look right, and are not."""
    for values in map(values_of, each(out)):
        if type(values) is Tensor:
            values.copy_(values.detach().reshape(-1).flip(0).view_as(values))


@dataclass
class Spots:
    """The activations of both draws, and what was seen of each contender, by its number."""

    activations: Mapping[str, Tensor]
    kept: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    prints: dict[str, dict[int, Print]] = field(default_factory=lambda: {A: {}, B: {}})
    seen: dict[int, list[Tensor | float]] = field(default_factory=dict)
    draw: SystemRandom = field(default_factory=SystemRandom)

    def of(self, numbers: Sequence[int]) -> "Spots":
        """Return the same for some of the contenders, numbered from 0."""
        prints = {
            which: {i: known[n] for i, n in enumerate(numbers) if n in known}
            for which, known in self.prints.items()
        }
        return replace(self, prints=prints, seen={})

    def keep(self, which: str) -> None:
        """Copy the activations as they are now."""
        self.kept[which] = {name: x.detach().clone() for name, x in self.activations.items()}

    def write(self, which: str) -> None:
        """Overwrite the activations, behind the back of torch's version counters."""
        for name, values in self.kept[which].items():
            self.activations[name].data.copy_(values)

    def turns(self, number: int, blocks: int, per_block: int) -> list[list[str]]:
        """Return the calls of each block: samples (""), and spots on A or on B."""
        turns = [[""] * per_block for _ in range(blocks)]
        if number in self.prints[A]:
            for block in self.draw.sample(range(blocks), max(1, int(SHARE * blocks))):
                place = self.draw.randrange(per_block + 1)
                turns[block].insert(place, self.draw.choice((A, B)))
        return turns

    def see(self, number: int, which: str, out: object) -> None:
        """Look at the output of a call, and write A again."""
        self.seen.setdefault(number, []).append(self.prints[which][number].distance(out))
        self.write(A)

    def burst(self, number: int, call: Callable[[], Outputs], wait: Callable[[], None]) -> None:
        """Look at many calls in turn on A and B: B's output is known, A's is like its first."""
        known = self.prints[B].get(number)
        if known is None:
            return
        seen = self.seen.setdefault(number, [])
        self.write(A)
        out = call()
        sums, away = sums_of(out), known.distance(out)
        if sums is None or (sums.shape[1] >= FEWEST and float(away) <= known.limit):
            seen.append(float("inf"))  # nothing, or B's
            return
        self.prints[A][number] = first = replace(known, sums=sums)
        turn_round(out)
        del out
        seen.append(first.distance(call()))
        began = perf_counter()
        for count in range(CALLS):
            which, print_ = ((B, known), (A, first))[count % 2]
            self.write(which)
            seen.append(print_.distance(call()))
            if count % LOOK_EVERY == 1:
                wait()
                if perf_counter() - began > BURST_S:
                    break
        self.write(A)

    def judged(self, number: int) -> str | None:
        """Say what was wrong with the calls that were seen since, or None."""
        seen, limit = [float(d) for d in self.seen.pop(number, [])], 0.0
        if number in self.prints[B]:
            limit = self.prints[B][number].limit
        wrong = [d for d in seen if not d <= limit]
        if not wrong:
            return None
        how = f"sums {wrong[0]:.2g} from the right ones, at most {limit:.2g} expected"
        return f"{len(wrong)} of {len(seen)} calls that were looked at are wrong: {how}"
