"""Operands of few small integers, whose product no rounding can hide: a missing term shows.

    W     -2, -1, 1 or 2 where the problem's W is not zero; at random
    X     -1 or 1 where a draw of the problem's X is not zero, but in each of `count` draws only in
          one class of its elements, which are dealt at random; 0 elsewhere
    Y     an integer. Where it is at most the largest integer below which the output's dtype has all
          (bf16: 256), the output must be equal to it

An op names the operand that is dealt (Op.exact), if each of its products has one factor from it. An
element of Y has d terms at most, so a draw gives it about d / count, with a variance of 2.5 each.
`count` keeps 6.5 standard deviations below that integer: 3 draws at d = 4096 in bf16. Each term is
in one of the draws, unless MOST_DRAWS are too few; then the draws leave some out, at random.

A kernel that rounds more than its output cannot be exact, so one for which the suite allows an
error is not judged in this way.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from random import SystemRandom

import torch
from torch import Tensor

from sparsebench.formats._format import is_stored
from sparsebench.harness.bench.contest_state import (
    ContestOptions,
    RunningContender,
    checked_before,
)
from sparsebench.harness.bench.correctness import Packing, packing_of
from sparsebench.harness.bench.operands import NONE, ChainLayer, Layers
from sparsebench.harness.bench.output_checks import right_answer
from sparsebench.harness.bench.prepare import prepare_layer
from sparsebench.harness.bench.spot_checks import values_of
from sparsebench.harness.bench.stages import Stages
from sparsebench.harness.ops._op import Op
from sparsebench.results.record import Contender, Status

LARGEST = {"bf16": 2**8, "fp8": 2**8, "fp16": 2**11, "fp32": 2**24, "tf32": 2**24}
"""The integers up to which an output holds all, by the dtype of the problem."""

PRUNED = Contender("dense", "any")  # the weights of the layer as they are
VARIANCE, DEVIATIONS = 2.5, 6.5
MOST_DRAWS = 16


@dataclass(frozen=True)
class ExactDraws:
    """A layer of integers, and the class of each element of the operand that is dealt."""

    op: Op
    layer: ChainLayer
    classes: Tensor
    signs: Tensor
    count: int

    def write(self, draw: int, activations: Mapping[str, Tensor]) -> None:
        """Write the activations of a draw."""
        for name, values in self.layer.dense.activations.items():
            if name == self.op.exact:
                values = torch.where(self.classes == draw, self.signs, 0)
            activations[name].copy_(values)

    def judge(
        self, call: Callable[[], object], activations: Mapping[str, Tensor], pack: Packing
    ) -> str:
        """Call on each draw; return "" or why an output is not the product."""
        for draw in range(self.count):
            self.write(draw, activations)
            if reason := self._reason(call(), activations, pack):
                return reason
        return ""

    def _reason(self, out: object, activations: Mapping[str, Tensor], pack: Packing) -> str:
        layer = replace(self.layer, dense=replace(self.layer.dense, activations=dict(activations)))
        right = pack(right_answer(self.op, layer, PRUNED, None).reference)
        values = values_of(out)
        if not isinstance(values, Tensor) or values.shape != right.shape:
            return f"expected shape {list(right.shape)}"  # `check` says it better
        differs = (values.double() != right) & (right.abs() <= LARGEST[layer.problem["dtype"]])
        if not bool(differs.any()):
            return ""
        at = [int(i) for i in torch.unravel_index(differs.long().argmax(), differs.shape)]
        pair = f"{float(values[*at]):g}, expected {float(right[*at]):g}"
        return f"a product of small integers: element {at} is {pair}"


def exact_draws(op: Op, layer: ChainLayer, seed: int) -> ExactDraws | None:
    """Return integers for a problem's first layer, or None if the op or the dtype has none."""
    dtype = layer.problem["dtype"]
    if op.exact is None or dtype not in LARGEST or layer.problem.fields.get("weight_bits"):
        return None
    device = next(iter(layer.dense.activations.values())).device
    random = torch.Generator(device).manual_seed(seed)

    def integers(like: Tensor, *values: int) -> Tensor:
        place = torch.randint(0, len(values), like.shape, generator=random, device=device)
        return torch.tensor(values, device=device)[place] * is_stored(like)

    dense = layer.dense
    weights = {n: integers(w, -2, -1, 1, 2).to(w.dtype) for n, w in dense.weights.items()}
    activations = {
        n: integers(x, -2, -1, 1, 2).to(x.dtype) if op.is_multiplied(n) else x.clone()
        for n, x in dense.activations.items()
    }
    dealt = dense.activations[op.exact]
    signs = integers(dealt, -1, 1)
    every = {**weights, **activations}
    arguments = {name: every[name].double() for name in op.arguments}
    longest = op.longest_sum(layer.problem, arguments)
    count = max(1, ceil(VARIANCE * longest * (DEVIATIONS / LARGEST[dtype]) ** 2))
    classes = torch.randint(0, count, dealt.shape, generator=random, device=device)
    originals = weights if dense.originals else NONE  # zeros are as good as any other integer
    integer = replace(dense, weights=weights, originals=originals, activations=activations)
    return ExactDraws(op, replace(layer, dense=integer), classes, signs, min(count, MOST_DRAWS))


def check_exact(
    entries: Iterable[RunningContender], layers: Layers, options: ContestOptions, stages: Stages
) -> None:
    """End each contender whose products are not exact, unless an earlier process checked it."""
    rivals = [entry for entry in entries if entry.running and not entry.contender.error]
    rivals = [entry for entry in rivals if not checked_before(entry.row, options)]
    first, op = layers.each[0], layers.op
    exact = exact_draws(op, first, SystemRandom().getrandbits(62)) if rivals else None
    for entry in rivals if exact else ():
        with stages.at(entry, "check"):
            assert exact
            call, layer = entry.calls["kernel"].work.run, first
            if not op.pattern:
                layer = exact.layer
                call = prepare_layer(layer, entry.contender, entry.row.choice).run
            if reason := exact.judge(call, layer.dense.activations, packing_of(entry.pattern)):
                entry.end(Status.WRONG, f"before timing: {reason}")
            stages.guard.renew(layers.activations)
            stages.verify()
