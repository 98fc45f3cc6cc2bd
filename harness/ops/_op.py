"""The contract of every file in harness/ops/: all that the harness knows about an op.

An op file defines one OP. Its definition in torch is the oracle (run in fp64), the dense baseline
(run in the problem's dtype) and the specification.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from torch import Tensor

from sparsebench.formats._format import is_stored
from sparsebench.kernels._kernel import DTYPES
from sparsebench.results.record import Problem, Value

Result = TypeVar("Result")
Values = Mapping[str, Any]
"""The fields of a problem."""

INTERMEDIATE = 3 / 8
"""The error of a term of `Op.spread`, in eps of the dtype, if intermediates are rounded to it."""

Block = PositiveInt | Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
"""A block's side, or its rows and columns."""


class Fields(BaseModel):
    """The fields of a problem of any op; an op adds its sizes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    dtype: Literal["fp16", "bf16", "fp32", "tf32", "fp8", "int8"]
    pattern: str = "dense"
    sparsity: float = Field(default=0.0, ge=0.0, lt=1.0)
    block: Block = 1


def require_field(condition: bool, expected: str, actual: object) -> None:
    """Raise ValueError, which a suite reports with its problem, unless the condition holds."""
    if not condition:
        raise ValueError(f"{expected}, not {actual}")


def require_groups(heads: int, kv_heads: int) -> None:
    """Raise ValueError unless each KV head serves the same number of query heads."""
    expected = f"heads a multiple of kv_heads, {kv_heads}"
    require_field(heads % kv_heads == 0, expected, heads)


@dataclass(frozen=True)
class Operand:
    """One operand: its role, the names of its two sizes, and its dtype by the problem's dtype.

    A size is a field of the problem, or one of the op's `sizes`. `dense` marks a weight that every
    contender stores dense, whatever its format.

    weight      stored in a contender's format
    activation  passed dense to every call
    routing     an activation of integers that no product takes; the op's `adjust` writes it
    pattern     stored like a weight, but only its indices matter: the definition does not take it,
                and the output, of the same sizes, has an element where it stores one
    mask        stored like a weight, but its elements are ones and zeros that say which parts the
                op leaves out. Contenders of format dense leave nothing out: they get ones, and are
                judged by the definition of ones
    """

    role: Literal["weight", "activation", "routing", "pattern", "mask"]
    shape: tuple[str, str]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=lambda: DTYPES)
    dense: bool = False


@dataclass(frozen=True)
class Sample:
    """A part of a problem, which is a smaller problem of the same op.

    seed      from which the part was drawn
    operands  those of the part, by name
    shape     of the whole problem's output
    part      takes the part's output out of the whole one
    text      names the part
    """

    seed: int
    problem: Problem
    operands: Mapping[str, Tensor]
    shape: tuple[int, ...]
    part: Callable[[Tensor], Tensor]
    text: str


@dataclass(frozen=True)
class Op:
    """An op. Functions map their arguments as written here; `problem` is a Problem.

    fields        pydantic model of a problem's fields
    operands      by name, in the order of the definition's arguments; at most one is a pattern
    definition    dense operands (without the pattern) in any dtype -> output [rows, columns], in
                  bf16 for fp8; keyword-only arguments are fields of the problem, and `fields` all
    spread        the same arguments in fp64 -> size, per output element, of the values that
                  rounding acts on: sqrt of the sum of squared terms; errors are compared with it
    both          the same arguments in fp64 -> definition and spread, for an op in which they share
                  most of the work; default: each by its own function
    intermediates values that a kernel may round to the problem's dtype before the output, by name;
                  `spread` has a term for each. Default: none, so an output is rounded once
    depth         the definition's operands -> most non-zero terms in one of its sums; default: most
                  non-zeros in a row of any weight
    flops         (problem, non-zeros by weight) -> operations that no kernel can avoid
    fewest_bytes  (problem, non-zeros by weight, bytes per element of a weight) -> bytes that no
                  kernel can avoid: every non-zero and activation read once, every output written
                  once, no index at all
    dense         problem -> the problem whose flops a dense product has; default: itself
    recorded      operands of a file, by name -> fields that follow from them beside sizes;
                  default: the op takes no recorded operands
    adjust        (problem, name, operand, draw): rewrites a drawn operand in place, to the same
                  bits on every device; default: no change
    derive        (problem, weights, activations): rewrites activations that follow from other
                  operands, once all are drawn, to the same bits on every device; default: none
    keeps_first   (problem, weight's name) -> whether pruning keeps its column 0; default: no
    parts         problem -> the rows of each result, if the output has several one below the
                  other, each judged by its own size; default: one result
    sizes         a problem's fields -> all sizes that operands name; default: the fields
    example       fields of a small problem, for checks of this contract (harness/testing), if not
                  any number is valid; default: any numbers
    prunes        (a problem's fields, weight's name) -> whether the pattern applies to that weight;
                  default: to all
    counts        (problem, weights) -> what `flops` and `fewest_bytes` read as non-zeros, by name,
                  of each weight and possibly of more; default: elements that are not zero
    full          problem -> the same counts if nothing is pruned; default: elements
    format_params a problem's fields -> parameters of from_dense for a format of masks
    derived       activations that `derive` computes in floating point, which the digest of the
                  operands leaves out: two devices may differ in a rounding
    values        distributions of drawn operands, by name, that are not normal; default: none
    copies        (a problem's fields, operand's name) -> how many copies a kernel holds; default: 1
    exact         the activation of which each product of the op has one factor, if the op is such
                  a product: with small integers its sums are exact (bench/exact_draws.py)
    readings      what a call of a kernel reads itself beside its time (Launch.readings); each is a
                  scope. Default: nothing
    sample        (problem, operands, seed) -> a random part whose answer is much cheaper than the
                  whole one, or None if the whole one is cheap; default: None
    """

    fields: type[Fields]
    operands: Mapping[str, Operand]
    definition: Callable[..., Tensor]
    spread: Callable[..., Tensor]
    flops: Callable[[Problem, Mapping[str, int]], float]
    fewest_bytes: Callable[[Problem, Mapping[str, int], int], int]
    both: Callable[..., tuple[Tensor, Tensor]] | None = None
    intermediates: tuple[str, ...] = ()
    depth: Callable[..., int] | None = None
    dense: Callable[[Problem], Problem] = lambda problem: problem
    recorded: Callable[[Mapping[str, Tensor]], dict[str, float | str]] | None = None
    adjust: Callable[[Problem, str, Tensor, int], None] = lambda *_: None
    derive: Callable[[Problem, Mapping[str, Tensor], Mapping[str, Tensor]], None] = lambda *_: None
    keeps_first: Callable[[Problem, str], bool] = lambda *_: False
    parts: Callable[[Problem], tuple[int, ...]] = lambda problem: ()
    sizes: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda fields: fields
    example: Mapping[str, Any] = field(default_factory=dict)
    prunes: Callable[[Mapping[str, Any], str], bool] = lambda *_: True
    copies: Callable[[Mapping[str, Any], str], int] = lambda *_: 1
    counts: Callable[[Problem, Mapping[str, Tensor]], dict[str, int]] | None = None
    full: Callable[[Problem], dict[str, int]] | None = None
    format_params: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda fields: {}
    derived: tuple[str, ...] = ()
    exact: str | None = None
    readings: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    sample: Callable[[Problem, Mapping[str, Tensor], int], Sample | None] = lambda *_: None

    @property
    def defaults(self) -> dict[str, Value]:
        """Return the defaults of the problem's fields; a published default never changes."""
        fields = self.fields.model_fields.items()
        return {name: info.default for name, info in fields if not info.is_required()}

    @property
    def weights(self) -> list[str]:
        return [name for name in self.operands if name not in self.activations]

    @property
    def activations(self) -> list[str]:
        roles = "activation", "routing"
        return [name for name, operand in self.operands.items() if operand.role in roles]

    def is_multiplied(self, name: str) -> bool:
        """Return whether an operand's values enter the products."""
        return self.operands[name].role in ("weight", "activation")

    @property
    def pattern(self) -> str | None:
        """Return the name of the operand whose pattern the output has; None if it is dense."""
        return self._name_of_role("pattern")

    @property
    def mask(self) -> str | None:
        return self._name_of_role("mask")

    def _name_of_role(self, role: str) -> str | None:
        return next((name for name, o in self.operands.items() if o.role == role), None)

    def definition_at(self, problem: Problem) -> Callable[..., Tensor]:
        """Return the definition with the fields of a problem, which takes only operands."""
        return with_fields(self.definition, problem)

    def answer(self, problem: Problem, arguments: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the output and its spread, from operands in fp64."""
        if self.both:
            return with_fields(self.both, problem)(**arguments)
        output, spread = (with_fields(f, problem) for f in (self.definition, self.spread))
        return output(**arguments), spread(**arguments)

    def longest_sum(self, problem: Problem, arguments: Mapping[str, Tensor]) -> int:
        """Return the most non-zero terms in a sum of the definition."""
        if self.depth:
            return int(with_fields(self.depth, problem)(**arguments))
        return longest_row(*(arguments[name] for name in self.weights))

    def nonzeros(self, problem: Problem, weights: Mapping[str, Tensor]) -> dict[str, int]:
        if self.counts:
            return self.counts(problem, weights)
        return {name: int(is_stored(weight).sum()) for name, weight in weights.items()}

    def elements(self, problem: Problem) -> dict[str, int]:
        if self.full:
            return self.full(problem)
        sizes = self.sizes(problem.fields)
        shapes = {name: self.operands[name].shape for name in self.weights}
        return {name: sizes[rows] * sizes[columns] for name, (rows, columns) in shapes.items()}

    def work(self, problem: Problem, nonzeros: Mapping[str, int]) -> dict[str, Any]:
        """Return the work of a problem in the fields of its rows."""
        itemsize = DTYPES[problem["dtype"]].itemsize
        return {
            "nnz": sum(nonzeros[name] for name in self.weights),
            "flops": self.flops(problem, nonzeros),
            "dense_flops": self.flops(self.dense(problem), self.elements(problem)),
            "fewest_bytes": self.fewest_bytes(problem, nonzeros, itemsize),
        }

    def distributions(self, problem: Problem) -> dict[str, str]:
        """Return how the elements of each operand are distributed, pruned ones apart.

        normal   bell-shaped, drawn from the seed (inputs/bits.py); `values` has the others
        file     as trained or recorded
        derived  computed from the other operands
        ones     of a mask
        unread   of a weight that only gives the pattern of the output
        routing  as the op says
        """
        of_file = bool(problem.source and problem.source.tensor)
        roles = {"mask": "ones", "pattern": "unread", "routing": "routing"}
        drawn = {name: self.values.get(name, "normal") for name in self.operands}
        drawn |= dict.fromkeys(self.derived, "derived")
        return {
            name: "file"
            if of_file and (self.recorded or operand.role == "weight")
            else roles.get(operand.role, drawn[name])
            for name, operand in self.operands.items()
        }

    def held_bytes(self, problem: Problem) -> int:
        """Return the bytes that a dense kernel holds for a problem, without the output."""
        fields, sizes = problem.fields, self.sizes(problem.fields)
        return sum(
            self.copies(fields, name)
            * prod(int(sizes[size]) for size in operand.shape)
            * operand.dtypes[problem["dtype"]].itemsize
            for name, operand in self.operands.items()
        )

    def output_bytes(self, problem: Problem, nonzeros: Mapping[str, int]) -> int:
        """Return the bytes of the output: the fewest without weights, less the activations."""
        sizes, dtype = self.sizes(problem.fields), problem["dtype"]
        counts = self.elements(problem)  # so that no activation is spared
        counts |= {name: nonzeros[name] if name == self.pattern else 0 for name in self.weights}
        taken: int = sum(
            prod(sizes[size] for size in operand.shape) * operand.dtypes[dtype].itemsize
            for operand in (self.operands[name] for name in self.activations)
        )
        return self.fewest_bytes(problem, counts, DTYPES[dtype].itemsize) - taken

    def rounds(self, dtype: str) -> bool:
        """Return whether a kernel may round activations to the dtype, because they are wider."""
        wide = (n for n in self.activations if self.operands[n].dtypes[dtype] != DTYPES[dtype])
        return any(map(self.is_multiplied, wide))

    @property
    def arguments(self) -> list[str]:
        return [name for name in self.operands if name != self.pattern]


def with_fields(function: Callable[..., Result], problem: Problem) -> Callable[..., Result]:
    """Set an op's keyword-only arguments: fields of the problem by name, or all `fields`."""
    names = inspect.getfullargspec(function).kwonlyargs
    return partial(function, **{n: problem.fields if n == "fields" else problem[n] for n in names})


def longest_row(*weights: Tensor) -> int:
    """Return the most non-zeros in a row of any of the weights."""
    return max(int((weight != 0).sum(1).max()) for weight in weights)
