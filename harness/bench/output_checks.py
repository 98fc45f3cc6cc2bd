"""Check what contenders return against the op's definition in fp64.

    before timing, and after it:
    draw new activations, from a seed that no kernel can know
    ─> compute what each layer should give, by the definition: in fp64, and in the problem's dtype
    ─> call each contender; before timing, its output is filled with NaN, or with the least integer
    ─> each output must be as near as its dtype allows (correctness.py); otherwise the contender is
       wrong
    ─> errors, lost values and draws go into the contender's rows

A contender with a chain is called once more, for the chain, and each layer's output is judged.

An op may name a random part of a large problem (Op.sample). Its answer suffices after timing, and
before it if an earlier process of the run compared the whole outputs of the same configurations.
It also has to suffice if there is too little memory for the whole answer. The rows then name the
part, pages mark them, and no later process takes the whole output as compared.
The seed of the part comes from the operating system. Then the calls that are inspected while timing
are compared with the first output, as a whole (spot_checks.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.harness.bench.correctness import Expected, check, roundings
from sparsebench.harness.bench.operands import ChainLayer, Layers, of_layer, without_mask
from sparsebench.harness.bench.spot_checks import Outputs, as_tuple, values_of
from sparsebench.harness.ops._op import Op, with_fields
from sparsebench.kernels._kernel import OUTPUTS, poison
from sparsebench.results.record import Contender

Errors = dict[str, Any]
"""The errors of a row (results/record.py), by the names of its fields."""


class Variant(NamedTuple):
    """The answers that contenders share: those of format dense ignore the mask of an op."""

    masked: bool
    weights: str

    @property
    def words(self) -> str:
        mask = "" if self.masked else " without the mask"
        return f"{mask}{' with unpruned weights' if self.weights == 'original' else ''}"


def variant(op: Op, contender: Contender) -> Variant:
    return Variant(op.mask is None or contender.format != "dense", contender.weights)


def right_answers(layers: Layers, contender: Contender, seed: int | None) -> list[Expected]:
    """Return what each layer should give; with a seed, for a part of a large problem."""
    return [right_answer(layers.op, layer, contender, seed) for layer in layers.each]


def misfit(expected: Sequence[Expected]) -> str:
    """Return why the right answers do not fit their dtype, or ""."""
    for right in expected:
        largest = float(right.reference.abs().max()) if right.reference.numel() else 0.0
        limits = torch.finfo if right.dtype.is_floating_point else torch.iinfo
        most = -limits(right.dtype).min
        if largest > most:
            fits = f"expected an answer that fits {right.dtype}, up to {most:.4g}"
            return f"{fits}; found {largest:.4g}"
    return ""


def arrays_of_answers(answers: Mapping[Variant, Sequence[Expected]]) -> dict[str, Tensor]:
    """Name every array of the right answers, which must not change while contenders run."""
    arrays: dict[str, Tensor | None] = {}
    for of, expected in answers.items():
        for number, right in enumerate(expected):
            where = f"{of.words}{of_layer(number)}"
            arrays[f"the expected answer{where}"] = right.reference
            arrays[f"the expected spread{where}"] = right.spread
            arrays[f"the expected plain{where}"] = right.plain
    return {name: array for name, array in arrays.items() if array is not None}


def poison_outputs(call: Callable[[], Outputs]) -> None:
    """Call once and overwrite the outputs.

    A launch with its own output buffer writes over the poison. One that allocates is likely to get
    the same memory again. If an output lies in an operand, the operand has changed now.
    """
    for values in map(values_of, as_tuple(call())):
        if type(values) is Tensor:
            poison(values)


def judge(
    outputs: Outputs, expected: Sequence[Expected], losses: Sequence[int], pattern: Format | None
) -> tuple[Errors, str]:
    """Judge the output of each layer; return the largest errors, and "" or which one is wrong.

    `losses` are the values that each layer dropped because its format had no room for them.
    """
    results, reasons = [], []
    each = zip(as_tuple(outputs), expected, losses, strict=True)
    for number, (out, right, count) in enumerate(each):
        result = check(out, right, pattern)
        reason = result.reason
        if count:
            values = "value" if count == 1 else "values"  # results/formatting.py loads pandas
            reason = f"{count} {values} lost: the format had no room for them"
        reasons += [f"{of_layer(number)}: {reason}"] if reason else []
        results.append(result)
    worst = max(results, key=lambda result: result.error or 0.0)
    errors = {name: value for name, value in vars(worst).items() if name != "reason"}
    return errors, reasons[0] if reasons else ""


def right_answer(op: Op, layer: ChainLayer, contender: Contender, seed: int | None) -> Expected:
    """Compute the right answer, or with a seed that of a part, if the op has one.

    torch's own comes first, before fp64 copies take memory.
    """
    problem, weights = layer.problem, layer.with_weights_of(contender).dense.weights
    masked = variant(op, contender).masked
    every = {**(weights if masked else without_mask(op, weights)), **layer.dense.activations}
    sample = None if seed is None else op.sample(problem, every, seed)
    if sample:
        problem, every = sample.problem, {**sample.operands}
    dense = {name: every[name] for name in op.arguments}
    plain = with_fields(op.definition, problem)(**dense)
    arguments = {name: operand.double() for name, operand in dense.items()}
    dtype = problem["dtype"]
    products, sums = roundings(dtype, op.rounds(dtype))
    reference, spread = op.answer(problem, arguments)
    return Expected(
        reference=reference,
        spread=spread,
        dtype=OUTPUTS[dtype],
        depth=op.longest_sum(problem, arguments),
        products=products,
        sums=sums,
        parts=op.parts(problem),
        rounded=bool(op.intermediates),
        plain=plain,
        sample=sample,
    )
