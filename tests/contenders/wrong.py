"""Kernels that are wrong, each in one way; the check must reject every one."""

import torch
from declare import kernel, weight_and_input

from sparsebench.kernels._kernel import Launch, Operands


@kernel()
def low_precision(operands: Operands) -> Launch:
    """Round the sum to 16 bits after every 16 products."""
    w, x = weight_and_input(operands)

    def run() -> object:
        out = x.new_zeros(len(x), len(w)).bfloat16()
        for start in range(0, x.shape[1], 16):
            out += (x[:, start : start + 16] @ w[:, start : start + 16].T).bfloat16()
        return out.to(x.dtype)

    return Launch(run)


@kernel()
def not_a_number(operands: Operands) -> Launch:
    """Divide by zero in one element."""
    w, x = weight_and_input(operands)

    def run() -> object:
        out = x @ w.T
        out[0, 0] /= 0
        return out

    return Launch(run)


@kernel()
def one_element(operands: Operands) -> Launch:
    """Miss one product in one element of the output."""
    w, x = weight_and_input(operands)
    column = int(w[1].abs().argmax())

    def run() -> object:
        out = x @ w.T
        out[2, 1] -= x[2, column] * w[1, column]
        return out

    return Launch(run)


@kernel()
def precomputed(operands: Operands) -> Launch:
    """Multiply in `prepare`, and only copy in the launch."""
    product = operands.activations["x"] @ operands.weights["w"].to_dense().T
    return Launch(product.clone)


@kernel()
def stale(operands: Operands) -> Launch:
    """Compute in the first call, and return that output in all others."""
    w, x = weight_and_input(operands)
    outputs: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        if not outputs:
            outputs.append(x @ w.T)
        return outputs[0].clone()

    return Launch(run)


@kernel()
def transposed(operands: Operands) -> Launch:
    """Read W as if it were stored [k, n], which is right for symmetric matrices only."""
    w, x = weight_and_input(operands)
    return Launch(lambda: x @ w.reshape(w.shape[1], w.shape[0]))


RIGHT_CALLS = 4


@kernel()
def turns_wrong(operands: Operands) -> Launch:
    """Be right during the check, and wrong when timed."""
    w, x = weight_and_input(operands)
    calls = 0

    def run() -> object:
        nonlocal calls
        calls += 1
        return x @ w.T if calls < RIGHT_CALLS else x @ w.T * 1.5

    return Launch(run)


@kernel()
def unwritten(operands: Operands) -> Launch:
    """Leave the last row of the output as it was."""
    w, x = weight_and_input(operands)
    out = x @ w.T

    def run() -> object:
        out[:-1] = x[:-1] @ w.T
        return out

    return Launch(run)


@kernel()
def wrong_layout(operands: Operands) -> Launch:
    """Return the right numbers feature-major, which leaves the transposition to the caller."""
    w, x = weight_and_input(operands)
    return Launch(lambda: (w @ x.T).T)


@kernel()
def wrong_type(operands: Operands) -> Launch:
    """Return sums in fp64 instead of the problem's dtype."""
    w, x = weight_and_input(operands)
    return Launch(lambda: x.double() @ w.double().T)


@kernel()
def zeros(operands: Operands) -> Launch:
    """Return zeros."""
    w, x = weight_and_input(operands)
    return Launch(lambda: torch.zeros(len(x), len(w), dtype=x.dtype, device=x.device))
