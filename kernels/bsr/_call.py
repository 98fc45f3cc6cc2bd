"""The calls of a block-sparse weight, and the engines that run them in suites.

    linear   Y [m, n]  = X [m, k] @ W [n, k].T      of X and the blocks as the product packs them
    dgrad    dX [m, k] = dY [m, n] @ W              of dY and the same
    wgrad    dW        = dY.T @ X, stored blocks    of dY and X; the result is [blocks, r, c]

A plan depends on W's index and the sizes only. It is made for a bucket of tokens
(_common/operator.py), and the values are operands.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.choices import density_of
from sparsebench.kernels._common.engines import gpu_engine
from sparsebench.kernels._common.operator import Engine, NoConfig, Operator, OperatorCall, bucket
from sparsebench.kernels._common.product import MOST_CONFIGS, Product
from sparsebench.kernels._kernel import NAMES, Operands
from sparsebench.kernels.bsr._wgmma_lists import checked
from sparsebench.results.record import Problem

LARGEST = 2**31 - 1  # the kernels count in int32


class BsrCall(NamedTuple):
    """A product for up to m tokens. With the index, it determines the plan.

    shape  n and k of W
    block  rows r and columns c
    dtype  of both operands, which is tf32 if `tf32` allows an fp32 product 10 bits of mantissa
    live   the values can change, so each call packs them
    """

    op: Literal["linear", "dgrad", "wgrad"]
    m: int
    shape: tuple[int, int]
    block: tuple[int, int]
    dtype: torch.dtype
    live: bool = True
    tf32: bool = False

    @property
    def transposed(self) -> bool:
        """Return whether the product is with W instead of W.T."""
        return self.op == "dgrad"

    @property
    def depth(self) -> int:
        """Return the columns of the activations that are read."""
        return self.shape[not self.transposed]

    @property
    def width(self) -> int:
        """Return the columns that Y or dX has."""
        return self.shape[self.transposed]

    @property
    def activations(self) -> list[Tensor]:
        """Return X of linear, dY of dgrad, or dY and X of wgrad, without values (device meta)."""
        sizes = self.shape if self.op == "wgrad" else (self.depth,)
        return [torch.empty(self.m, size, dtype=self.dtype, device="meta") for size in sizes]


def problem_of(call: BsrCall, stored: int) -> dict[str, Any]:
    """Return a call's sizes and layout for a weight of `stored` blocks, as a list has them."""
    fields = {"op": f"bsr.{call.op}", "dtype": NAMES.get(call.dtype, str(call.dtype))}
    (n, k), density = call.shape, density_of(*call.shape, call.block, stored)
    sizes = {"block": list(call.block), "m": call.m, "n": n, "k": k, "density": density}
    return {**fields, **sizes, "live": call.live, **({"tf32": True} if call.tf32 else {})}


def bsr_engine(
    name: str,
    op: Literal["linear", "dgrad", "wgrad"],
    choices: Callable[[Bsr, BsrCall], Sequence[Any]],
    plan: Callable[[Bsr, BsrCall, Any], Product],
    unsupported: Callable[[Problem, torch.device], str | None],
    config: type = NoConfig,
    unsupported_call: Callable[[Bsr, BsrCall], str | None] = lambda w, call: None,
) -> Engine:
    """Return an engine of this format; at most MOST_CONFIGS of its choices are timed.

    unsupported_call  (w, call) -> why no configuration can run the call, or None
    """

    given = name, "linear" if op == "linear" else f"linear_{op}", "bsr", config
    return gpu_engine(*given, choices, plan, unsupported, bind, unsupported_call, most=MOST_CONFIGS)


def bind(operands: Operands, engines: tuple[Engine, ...]) -> OperatorCall:
    """Return the call of a suite's operands: a frozen weight, packed once. Raises Unsupported."""
    op, a = operands.problem.op, operands.activations
    w = operands.pattern if op == "linear_wgrad" else operands.weights["w"]
    if not isinstance(w, Bsr):
        raise Unsupported(f"expected a weight in bsr, found {type(w).__name__}")
    short: Any = op.removeprefix("linear_")
    names = {"linear": ("x",), "dgrad": ("dy",), "wgrad": ("dy", "x")}[short]
    activations = tuple(a[name] for name in names)
    sizes, tokens = (w.shape, w.block, w.values.dtype), bucket(len(activations[0]))
    tf32 = operands.problem["dtype"] == "tf32"
    call = BsrCall(short, tokens, *sizes, live=False, tf32=tf32)

    def weight(call: BsrCall) -> Bsr:
        checked(w)
        return w

    def problem(call: BsrCall) -> dict[str, Any]:
        return problem_of(call, len(w.columns))

    operator = Operator(engines, weight, problem, w.columns.device)
    if short == "wgrad":
        return OperatorCall(
            operator, call, activations, result=lambda values: replace(w, values=values)
        )
    return OperatorCall(operator, call, activations, lambda product: (product.packed(w.values),))
