"""The activations of a guest's calls, which no earlier call had, and the outputs that came back.

    set j: activations of all layers, drawn here ─> a call of the guest ─> outputs, compared here

The judge draws and compares copies of its own. Otherwise a guest could write other activations for
an output that it has, and a process that it left could compute answers while the judge compares.

Half of the elements of a set are those of the first draw, at random places, unless the op or a file
gives activations a structure of their own. A packed output has only the elements that its format
stores; the guest says where, and the judge requires each element of the weight there, once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import SystemRandom
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats._format import BITS, is_stored
from sparsebench.harness.bench.contest_state import GuestLoss
from sparsebench.harness.bench.correctness import Expected, where_stored
from sparsebench.harness.bench.guest import Burst, Sets, sets_of
from sparsebench.harness.bench.operands import ChainLayer, Layers, other_draw, redraw
from sparsebench.harness.bench.output_checks import judge, misfit, right_answer
from sparsebench.results.record import Contender, Status


class GuestSets:
    """The judge's side of the sets; `drawn` is the number of the last draw.

    shared   what the guest reads and writes
    own      the same arrays, which it cannot see: `send` and `receive` copy
    """

    def __init__(self, layers: Layers, contender: Contender) -> None:
        self._layers, self._op, self._contender = layers, layers.op, contender
        self._random, self._first = SystemRandom(), dict[str, Tensor]()
        self.drawn = 0
        self._shared: Sets = ()
        self._own: Sets = ()
        self._positions: Tensor | None = None

    def take(self, arrays: Mapping[str, Tensor], names: list[str], count: int) -> Burst:
        """Use the arrays of an arena for these layers; return a burst that calls nothing.

        Raises GuestLoss if a packed output leaves out an element of the weight.
        """
        activations, self._shared = sets_of(arrays, self._op.activations, names, count)
        self._own = [
            ({name: x.clone() for name, x in values.items()}, [y.clone() for y in outputs])
            for values, outputs in self._shared
        ]
        if "positions" in arrays:
            self._positions = self._places(arrays["positions"])
        out = self._shared[0][1][0]
        outputs = out if len(names) == 1 else (out,) * len(names)
        return Burst(lambda: outputs, activations, self._shared)

    def first(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return the activations and the output of the first set, of the first layer."""
        values, outputs = self._own[0]
        return {name: values[name] for name in self._op.activations}, outputs[0]

    def send(self, count: int) -> None:
        """Let the guest have the activations of the first sets."""
        for (mine, _), (theirs, _) in zip(self._own[:count], self._shared, strict=False):
            for name, x in mine.items():
                theirs[name].copy_(x)

    def receive(self, count: int) -> None:
        """Take the outputs of the first sets."""
        for (_, mine), (_, theirs) in zip(self._own[:count], self._shared, strict=False):
            for out, values in zip(mine, theirs, strict=True):
                out.copy_(values)

    def fill(self, count: int, layers: Iterable[ChainLayer]) -> None:
        """Draw activations that no call has had for the first sets and layers, and send them."""
        for values, _ in self._own[:count]:
            for layer in layers:
                mine = {name: values[f"{name}{layer.name}"] for name in self._op.activations}
                recordings = layer.dense.recordings
                self.drawn = other_draw(self.drawn, [*recordings.values()])
                redraw(layer.problem, self._op, mine, self.drawn, recordings, layer.dense.weights)
                if not recordings and layer.problem.fields.get("active") is None:
                    self._mix(layer, mine)
        self.send(count)

    def _mix(self, layer: ChainLayer, activations: Mapping[str, Tensor]) -> None:
        for name in self._op.activations:
            if name not in self._op.derived and self._op.is_multiplied(name):
                x = activations[name].view(BITS[activations[name].element_size()])
                first = self._first.setdefault(f"{name}{layer.name}", x.clone())
                coin = torch.Generator(x.device).manual_seed(self._random.getrandbits(62))
                keep = torch.randint(0, 2, x.shape, generator=coin, device=x.device).bool()
                x.copy_(torch.where(keep, first, x))
        self._op.derive(layer.problem, layer.dense.weights, activations)

    def expected(
        self, layer: ChainLayer, activations: Mapping[str, Tensor], *, whole: bool
    ) -> Expected:
        """Return the right answer of a layer for these activations; of a part unless `whole`."""
        mine = {n: activations[f"{n}{layer.name}"] for n in self._op.activations}
        drawn = replace(layer, dense=replace(layer.dense, activations=mine))
        seed = None if whole else self._random.getrandbits(64)
        allowed = (self._contender.error or {}).get("at_most")
        return replace(right_answer(self._op, drawn, self._contender, seed), allowed=allowed)

    def judge(self, number: int, layers: int, lost: int, *, whole: bool) -> tuple[Any, str]:
        """Compare an output that was received; return the errors, and "" or why it is wrong."""
        values, outputs = self._own[number]
        each = self._layers.each[:layers]
        expected = [self.expected(layer, values, whole=whole) for layer in each]
        if reason := misfit(expected):
            raise GuestLoss(Status.UNSUPPORTED, reason)
        if self._positions is not None:
            expected = [where_stored(each, self.pack) for each in expected]
        losses = [lost, *[0] * (layers - 1)]
        errors, reason = judge(tuple(outputs[:layers]), expected, losses, None)
        return errors, reason.removeprefix(": ")

    def pack(self, full: Tensor) -> Tensor:
        """Return what an output stores of a matrix."""
        if self._positions is None:
            return full
        taken = full.reshape(-1)[self._positions.clamp(min=0)]
        return torch.where(self._positions >= 0, taken, 0).view(self._own[0][1][0].shape)

    def _places(self, positions: Tensor) -> Tensor:
        """Return which element each stored value is, -1 for padding. Raises GuestLoss."""
        places = positions.long() - 1
        weight = self._layers.each[0].dense.weights[str(self._op.pattern)]
        inside = bool(((places >= -1) & (places < weight.numel())).all())
        counts = torch.zeros(weight.numel(), dtype=torch.int64, device=weight.device)
        if inside:
            counts += torch.bincount(places[places >= 0], minlength=weight.numel())
        missing = is_stored(weight).view(-1) & (counts == 0)
        if not inside or bool((counts > 1).any()) or bool(missing.any()):
            expected = "expected a packed output with each element of the weight once"
            raise GuestLoss(Status.WRONG, f"{expected}, found others")
        return places
