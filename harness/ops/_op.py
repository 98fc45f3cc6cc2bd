"""The contract that every file in harness/ops/ keeps: all that the harness knows of an op.

An op file names one OP. Its definition in torch is the oracle (run in fp64), the dense baseline
(run in the problem's dtype) and the specification.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from torch import Tensor

from sparsebench.kernels._kernel import DTYPES
from sparsebench.results.record import Problem, Value

Block = PositiveInt | Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
"""A block's side, or its rows and columns."""


class Fields(BaseModel):
    """The fields that a problem of any op has; an op adds its sizes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    dtype: Literal["fp16", "bf16", "fp32", "tf32", "fp8"]
    pattern: str = "dense"
    sparsity: float = Field(default=0.0, ge=0.0, lt=1.0)
    block: Block = 1


@dataclass(frozen=True)
class Operand:
    """One operand: its role, its two sizes by name, how it is stored by the problem's dtype.

    A size is a field of the problem, or one of the op's `sizes`.

    weight      stored in a contender's format
    activation  arrives dense at every call
    pattern     stored as a weight is, for where its elements are: the definition does not take it,
                and the output, of the same sizes, has an element wherever it stores one
    """

    role: Literal["weight", "activation", "pattern"]
    shape: tuple[str, str]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=lambda: DTYPES)


@dataclass(frozen=True)
class Op:
    """An op.

    fields        pydantic model of a problem's fields
    operands      by name, in the order of the definition's arguments; at most one is a pattern
    definition    dense operands in any dtype, but for a pattern, to the output [rows, columns],
                  of fp8 in bf16; arguments taken by keyword alone are fields of the problem
    spread        the same arguments in fp64 to the size, per output element, of the values that
                  rounding acts on: sqrt of the sum of squared terms; errors are held against it
    depth         the operands of the definition to the most non-zero terms in one of its sums
    flops         (problem, non-zeros by weight name) to the operations no kernel can avoid
    fewest_bytes  (problem, non-zeros by weight name, bytes a weight's element) to the bytes
                  likewise: every non-zero and activation read once, every output written once, no
                  index at all
    dense         the problem to that whose flops a dense product has; default: itself
    recorded      operands out of a file, by name, to the fields that follow from them beside sizes;
                  default: none, and the op takes none
    adjust        (problem, operand's name, operand, number of the draw) rewrites an operand that
                  was drawn, in place and to the same bits on every device; default: leaves it
    settle        (problem, weights, activations) rewrites activations that follow from other
                  operands, once all are drawn, in place and to the same bits on every device;
                  default: none do
    keeps_first   (problem, weight's name) to whether pruning leaves its column 0 whole; default: no
    parts         the problem to the rows of an output that is several results, one below the other,
                  each held against its own size; default: one
    sizes         a problem's fields to all that operands name as sizes, fields included; default:
                  the fields
    example       sizes of a small problem, of fields that not any number suits, for checks of this
                  contract (harness/testing); default: any numbers suit
    prunes        (a problem's fields, weight's name) to whether the pattern holds for that weight;
                  default: it holds for all
    copies        (a problem's fields, operand's name) to how many of it a kernel holds; default:
                  one
    """

    fields: type[Fields]
    operands: Mapping[str, Operand]
    definition: Callable[..., Tensor]
    spread: Callable[..., Tensor]
    depth: Callable[..., int]
    flops: Callable[[Problem, Mapping[str, int]], float]
    fewest_bytes: Callable[[Problem, Mapping[str, int], int], int]
    dense: Callable[[Problem], Problem] = lambda problem: problem
    recorded: Callable[[Mapping[str, Tensor]], dict[str, float | str]] | None = None
    adjust: Callable[[Problem, str, Tensor, int], None] = lambda *_: None
    settle: Callable[[Problem, Mapping[str, Tensor], Mapping[str, Tensor]], None] = lambda *_: None
    keeps_first: Callable[[Problem, str], bool] = lambda *_: False
    parts: Callable[[Problem], tuple[int, ...]] = lambda problem: ()
    sizes: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda fields: fields
    example: Mapping[str, int] = field(default_factory=dict)
    prunes: Callable[[Mapping[str, Any], str], bool] = lambda *_: True
    copies: Callable[[Mapping[str, Any], str], int] = lambda *_: 1

    @property
    def defaults(self) -> dict[str, Value]:
        """Return the defaults of the problem's fields; once published, a default never changes."""
        known = self.fields.model_fields.items()
        return {name: info.default for name, info in known if not info.is_required()}

    @property
    def weights(self) -> list[str]:
        """Name the operands that formats store."""
        return [name for name, operand in self.operands.items() if operand.role != "activation"]

    @property
    def activations(self) -> list[str]:
        """Name the operands that arrive dense at every call."""
        return [name for name, operand in self.operands.items() if operand.role == "activation"]

    @property
    def pattern(self) -> str | None:
        """Name the operand whose pattern the output has; None where the output is dense."""
        return next((name for name, o in self.operands.items() if o.role == "pattern"), None)

    def held_bytes(self, problem: Problem) -> int:
        """Return the bytes of all that a dense kernel of a problem holds, but for the output."""
        fields, sizes = problem.fields, self.sizes(problem.fields)
        return sum(
            self.copies(fields, name)
            * prod(int(sizes[size]) for size in operand.shape)
            * operand.dtypes[problem["dtype"]].itemsize
            for name, operand in self.operands.items()
        )

    def rounds(self, dtype: str) -> bool:
        """Say whether a kernel may round activations to the dtype: they arrive in a wider one."""
        return any(self.operands[n].dtypes[dtype] != DTYPES[dtype] for n in self.activations)

    @property
    def arguments(self) -> list[str]:
        """Name the operands that the definition takes."""
        return [name for name in self.operands if name != self.pattern]


def longest_row(*weights: Tensor) -> int:
    """Return the most non-zeros in a row of any of the weights."""
    return max(int((weight != 0).sum(1).max()) for weight in weights)
