"""The calls of a 2:4 hybrid weight, and the operands of suites that make them.

    Y [m, n]     = X [m, k] @ W.T
    H [m, n / 2] = act(X @ Wg.T) * (X @ Wu.T)    with an activation: W is gate and up (spense_ffn)

A product depends on the sizes only, so all weights of a layout can share it. The tiles of W are
operands, and so are the fp32 scales of the sums in fp8, one for each row of W and one for each
token; None is 1:

    product.run(x, sparse, dense, features=None, tokens=None, out=None)
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.operator import Engine, Operator, OperatorCall, bucket
from sparsebench.kernels._kernel import Operands, output_dtype

ALIGNMENT = 16  # bytes that one instruction copies at a time, or TMA at least
LARGEST = 2**31 - 1  # the kernels count in int32
TALLEST = 256  # tokens of the largest tile
LIFTED = 6, 8  # elements of each group of a lifted weight that are not zero, and its elements
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}
"""Names of dtypes; state dicts store the position."""


class SpenseCall(NamedTuple):
    """A product for up to m tokens. It determines the plan on a device.

    shape         n and k of W
    sparse_shape  rows and columns of its sparse part
    dtype         of X and W
    activation    if set, W is gate and up, and the result is H
    lifted_from   columns of X, if W is a lifted 6:8 matrix (formats/slide.py)
    """

    m: int
    shape: tuple[int, int]
    sparse_shape: tuple[int, int]
    dtype: torch.dtype
    activation: str | None = None
    lifted_from: int | None = None

    @property
    def depth(self) -> int:
        """Return the columns of X."""
        return self.lifted_from or self.shape[1]

    @property
    def width(self) -> int:
        """Return the columns of the result."""
        return self.shape[0] // 2 if self.activation else self.shape[0]

    @property
    def kind(self) -> torch.dtype:
        """Return the dtype of the result: that of X for H, and bf16 for Y in fp8."""
        return self.dtype if self.activation else output_dtype(self.dtype)


def problem_of(call: SpenseCall) -> dict[str, Any]:
    """Return a call's sizes, as a list of choices has them; a 2:4 element counts half."""
    (n, k), (rows, columns) = call.shape, call.sparse_shape
    density, form = float(f"{1 - rows * columns / (2 * n * k):.2g}"), "spense"
    if call.lifted_from:
        density, form = LIFTED[0] / LIFTED[1], "slide"
    fields = {"op": f"{form}.linear", "dtype": NAMES.get(call.dtype, str(call.dtype))}
    sizes = {"m": call.m, "n": n, "k": call.depth, "density": density}
    return {**fields, "activation": call.activation, **sizes}


def unsupported_sizes(
    call: SpenseCall, dtypes: tuple[torch.dtype, ...], step: int, most: int
) -> str | None:
    """Return why no kernel for these dtypes can run a call, or None.

    step  n must be a multiple of it
    most  largest n and k
    """
    (n, k), depth, readable = call.shape, call.depth, ALIGNMENT // call.dtype.itemsize
    if call.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"expected operands of one dtype of {names}; found {call.dtype}"
    if depth % readable or n % step:
        rows = f"{step} {'rows of gate and up' if call.activation else 'columns of Y'}"
        return f"expected multiples of {readable} columns of X and {rows}, found {depth} and {n}"
    if not 0 < call.m <= LARGEST - TALLEST or not 0 < min(n, k) <= max(n, k) <= most:
        return f"expected 1 to 2^31 tokens and 1 to {most} columns, found {call.m}, {n} and {k}"
    return None


def bind(operands: Operands, engines: tuple[Engine, ...]) -> OperatorCall:
    """Return the call of a suite's operands. Raises Unsupported."""
    return bound(weight_of(operands.weights, "w"), operands.activations["x"], engines)


def bound(
    w: Spense,
    x: Tensor,
    engines: tuple[Engine, ...],
    scale: Tensor | None = None,
    *,
    activation: str | None = None,
    lifted_from: int | None = None,
) -> OperatorCall:
    """Return a call of X with a weight, and in fp8 the scales of its rows."""
    call = SpenseCall(bucket(len(x)), w.shape, w.sparse_shape, w.dtype, activation, lifted_from)
    operator = Operator(engines, lambda call: w, problem_of, w.sparse.device)
    return OperatorCall(operator, call, (x,), lambda product: (w.sparse, w.dense, scale))


def weight_of(weights: Mapping[str, Format], name: str) -> Spense:
    """Return a weight of a suite. Raises Unsupported."""
    weight = weights[name]
    if not isinstance(weight, Spense):
        raise Unsupported(f"expected a weight in spense, found {type(weight).__name__}")
    return weight
