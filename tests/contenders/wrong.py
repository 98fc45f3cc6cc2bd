"""Kernels that are wrong, each in one way; the check must reject every one."""

import torch
from declare import Run, by_call, kernel, prepare_linear, run_linear
from torch import Tensor

from sparsebench.kernels._kernel import Launch, Operands


@run_linear
def low_precision(w: Tensor, x: Tensor) -> object:
    """Round the sum to 16 bits after every 16 products."""
    out = x.new_zeros(len(x), len(w)).bfloat16()
    for start in range(0, x.shape[1], 16):
        out += (x[:, start : start + 16] @ w[:, start : start + 16].T).bfloat16()
    return out.to(x.dtype)


@prepare_linear()
def one_element(w: Tensor, x: Tensor) -> Run:
    """Miss one product, the largest, in one element of the output."""

    def run() -> object:
        out, terms = x @ w.T, x[2] * w[1]
        out[2, 1] -= terms[terms.abs().argmax()]
        return out

    return run


@kernel()
def precomputed(operands: Operands) -> Launch:
    """Multiply in `prepare`, and only copy in the launch."""
    product = operands.activations["x"] @ operands.weights["w"].to_dense().T
    return Launch(product.clone)


@prepare_linear()
def stale(w: Tensor, x: Tensor) -> Run:
    """Compute in the first call, and return that output in all others."""
    outputs: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        if not outputs:
            outputs.append(x @ w.T)
        return outputs[0].clone()

    return run


@prepare_linear()
def transposed(w: Tensor, x: Tensor) -> Run:
    """Read W as if it were stored [k, n], which is right for symmetric matrices only."""
    return lambda: x @ w.reshape(w.shape[1], w.shape[0])


RIGHT_CALLS = 4


@by_call
def turns_wrong(w: Tensor, x: Tensor, call: int) -> object:
    """Be right during the check, and wrong when timed."""
    return x @ w.T if call < RIGHT_CALLS else x @ w.T * 1.5


@prepare_linear()
def unwritten(w: Tensor, x: Tensor) -> Run:
    """Leave the last row of the output as it was."""
    out = x @ w.T

    def run() -> object:
        out[:-1] = x[:-1] @ w.T
        return out

    return run


@prepare_linear()
def zeros(w: Tensor, x: Tensor) -> Run:
    """Return zeros."""
    return lambda: torch.zeros(len(x), len(w), dtype=x.dtype, device=x.device)
