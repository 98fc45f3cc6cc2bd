"""STK on an NVIDIA GPU: a Triton kernel over blocks of 128x128.

    dds    Y = X @ W.T, dX = dY @ W    a tile of Y from a block row of W; X and Y in place
    sdd    dW = dY.T @ X               dY.T is a view of dY, or the launch copies it to rows

Its product of a sparse left operand, Y.T = W @ X.T, needs a transposition of Y.T, and was always
slower (NOTES.md).

STK (Gale et al. 2022, MegaBlocks) has no other choices: tiles of 128 x 128 x 32, four warps, four
stages. It uses the blocks as they are stored.

    dtype  fp16 or bf16; tf32, which it uses for fp32
    m      padded to a multiple of 128, for the gradient of W to one of 32 (_common/padding.py)
    n, k   multiples of 128, at most 32768, because int16 indices times 128 overflow beyond
           (stanford-futuredata/stk pull request 17). X and Y have less than 2^31 elements, because
           offsets are int32

Source: stanford-stk 0.7.1, stk/ops/linear_ops.py and stk/backend/triton_kernels.py.
"""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._format import rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.padding import multiple_of, padded
from sparsebench.kernels._common.requirements import unsupported_dtype, unsupported_sizes
from sparsebench.kernels._common.search import fastest_choice
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Problem

DTYPES = "fp16", "bf16", "tf32"
SIDE = 128
DEPTH = 32  # its tile of the sum, which is over tokens for the gradient of W
LARGEST = 2**15  # limit of n and k
ELEMENTS = 2**31  # activations and output must have fewer


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why STK cannot run here, or None. A chemistry package has the same import name."""
    if device.type != "cuda":
        return f"expected an NVIDIA GPU, found device {device}"
    m, n, k = (problem[size] for size in "mnk")
    if max(n, k) > LARGEST or multiple_of(SIDE, m) * max(n, k) >= ELEMENTS:
        expected = f"n and k of at most {LARGEST} and less than 2^31 elements of activations"
        return f"STK expected {expected} and output, found m {m}, n {n}, k {k}"
    reason = unsupported_dtype(problem, *DTYPES) or unsupported_sizes(problem, n=SIDE, k=SIDE)
    return reason or unavailable()


def unavailable() -> str | None:
    """Return that STK is missing, or None."""
    try:
        version("stanford-stk")
    except PackageNotFoundError:
        return "needs STK: pip install stanford-stk"
    return None


def prepare(operands: Operands) -> Launch:
    """Pass the format's arrays to STK. Raises Unsupported."""
    w = operands.weights["w"]
    assert isinstance(w, Bsr)
    return multiplied(operands.activations["x"], matrix(w).t())


def prepare_dgrad(operands: Operands) -> Launch:
    """Do the same for dX = dY @ W. STK reads W's blocks through its transposed index."""
    w = operands.weights["w"]
    assert isinstance(w, Bsr)
    return multiplied(operands.activations["dy"], matrix(w))


def prepare_wgrad(operands: Operands) -> Launch:
    """Time both layouts of dY.T for the stored blocks of dW, one program for each block.

    STK returns a matrix of the given pattern, whose `data` are the values.
    """
    dy, x, w = operands.activations["dy"], operands.activations["x"], operands.pattern
    assert isinstance(w, Bsr)
    topology, rows = matrix(w), multiple_of(DEPTH, len(x))
    left, right = padded(dy, rows), padded(x, rows)
    from stk import ops

    def run(layout: str) -> Bsr:
        turned = left.filled().t()
        turned = turned.contiguous() if layout == "copied" else turned
        return replace(w, values=ops.sdd(turned, right.filled(), topology).data)

    layouts = [{"layout": name} for name in ("view", "copied")]
    return fastest_choice(run, layouts, operands, **right.choice)


def matrix(w: Bsr) -> Any:
    """Return W as a matrix of STK, with a transposed index. Raises Unsupported."""
    if w.block != (SIDE, SIDE):
        r, c = w.block
        raise Unsupported(f"STK expected blocks of {SIDE}x{SIDE}, found {r}x{c}")
    import stk

    rows, columns = rows_of(w.offsets).to(torch.int16), w.columns.to(torch.int16)
    return stk.Matrix(w.shape, w.values, rows, columns, w.offsets)


def multiplied(x: Tensor, w: Any) -> Launch:
    """Return the launch of X @ W, for W a matrix of STK."""
    from stk import ops

    m, tokens = len(x), padded(x, multiple_of(SIDE, len(x)))

    def run() -> Tensor:
        y: Tensor = ops.dds(tokens.filled(), w)[:m]
        return y

    return Launch(run, {"layout": "dds", **tokens.choice})


KERNEL = Kernel("linear", "bsr", "cuda", prepare, unsupported)

DGRAD = Kernel("linear_dgrad", "bsr", "cuda", prepare_dgrad, unsupported)
"""Input gradient by STK: dX = dY @ W."""

WGRAD = Kernel("linear_wgrad", "bsr", "cuda", prepare_wgrad, unsupported)
"""Weight gradient by STK: the stored blocks of dW = dY.T @ X, the fastest of its layouts."""
