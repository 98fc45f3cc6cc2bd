"""The calls of a weight with zeros anywhere (csr, bitmap), and how suites bind them.

    linear   Y [m, n]  = X [m, k] @ W [n, k].T       of X
    dgrad    dX [m, k] = dY [m, n] @ W               of dY; the plan is one of linear for W.T
    wgrad    dW        = dY.T @ X at W's non-zeros   of dY and X; the result is values [nnz]

A plan holds the weight's values, in the order in which its kernel reads them, so only activations
are operands. It is made for a bucket of tokens (operator.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.operator import Engine, Operator, OperatorCall, bucket
from sparsebench.kernels._common.transposed import transposed
from sparsebench.kernels._kernel import NAMES, Operands

ACTIVATIONS = {"linear": ("x",), "dgrad": ("dy",), "wgrad": ("dy", "x")}


class UnstructuredCall(NamedTuple):
    """A product for up to m tokens. With the weight, it determines the plan."""

    op: Literal["linear", "dgrad", "wgrad"]
    m: int


def operator_of(
    w: Csr | Bitmap,
    engines: tuple[Engine, ...],
    likeliest: Callable[[UnstructuredCall], Sequence[Engine]] | None = None,
) -> Operator:
    """Return the plans of a weight. They are of its values as these are when a plan is made."""
    n, k = w.shape
    if isinstance(w, Csr):
        kind, dtype, density = "csr", w.values.dtype, max(len(w.values), 1) / (n * k)
    else:
        kind, dtype, density = "bitmap", w.dtype, w.stored_bytes / (n * k * w.dtype.itemsize)

    @cache
    def turned() -> Any:
        assert isinstance(w, Csr)
        return transposed(w)

    def weight(call: UnstructuredCall) -> Any:
        return turned() if call.op == "dgrad" else w

    def problem(call: UnstructuredCall) -> dict[str, Any]:
        fields = {"op": f"{kind}.{call.op}", "dtype": NAMES[dtype]}
        return {**fields, "m": call.m, "n": n, "k": k, "density": float(f"{density:.2g}")}

    return Operator(engines, weight, problem, w.offsets.device, likeliest)


def bind(operands: Operands, engines: tuple[Engine, ...]) -> OperatorCall:
    """Return the call of a suite's operands."""
    op: Any = operands.problem.op.removeprefix("linear_")
    w = operands.pattern if op == "wgrad" else operands.weights["w"]
    assert isinstance(w, Csr | Bitmap)
    activations = tuple(operands.activations[name] for name in ACTIVATIONS[op])
    bound = operator_of(w, engines), UnstructuredCall(op, bucket(len(activations[0]))), activations
    if isinstance(w, Csr) and op == "wgrad":
        return OperatorCall(*bound, result=lambda values: replace(w, values=values))
    return OperatorCall(*bound)
