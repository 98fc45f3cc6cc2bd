"""SpenseGPT: one pass of SparseGPT over the sparse columns, compensated in all later columns.

    H = X^T X + damping      U upper triangular with H^-1 = U^T U

    for every column i, from left to right:              columns   . . x . | B ────── | dense
        every 4: prune the 2 smallest (w_i / U_ii)²                done    i  lazily    last
        or every B: the smallest of all rows, or blocks, together
        e = w_i / U_ii if w_i is pruned, else 0
        set the pruned elements of w_i to 0; column i is then final
        w_j -= e U_ij for all j > i

The update compensates the error of a pruned element in the columns to its right. The dense columns
are last and never pruned, so they compensate errors of all others. Updates beyond a block of B
columns are one product per block. Rows are independent of each other.

Sources: Frantar and Alistarh, arXiv 2301.00774, algorithm 1 (blocks of 128, damping of 1 % of the
mean diagonal; an unstructured mask covers all rows of a block); Lee et al., arXiv 2606.10445,
section 3.3 (dense columns last).
"""

import torch
from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.harness.models.pruning.pattern import TWO_FOUR, Pattern

BLOCK = 128
DAMPING = 0.01


def prune(weight: Tensor, x: Tensor, columns: int, pattern: Pattern = TWO_FOUR) -> Tensor:
    """Return the weight [n, k] with its first `columns` columns pruned and the others updated.

    x [tokens, k] are the inputs; both tensors are fp32. Raises SuiteError for fewer tokens than
    inputs, because H would then describe the sample rather than the layer.
    """
    tokens, inputs = x.shape
    if tokens < inputs:
        expected = f"at least {inputs} calibration tokens, one per input"
        raise SuiteError(f"spensegpt: expected {expected}; found {tokens}")
    upper = _factor(x)
    # Transposed, so that each step reads and writes contiguous rows.
    transposed = weight.T.clone(memory_format=torch.contiguous_format)
    panel = max(BLOCK // pattern.unit, 1) * pattern.unit
    for start in range(0, columns, panel):
        end = min(start + panel, columns)
        errors = _prune_block(transposed[start:end], upper[start:end, start:end], pattern)
        transposed[end:] -= upper[start:end, end:].T @ errors
    return transposed.T.contiguous()


def _factor(x: Tensor) -> Tensor:
    """Return U [k, k], computed in fp64 because H squares the condition number of the inputs.

    Damping also handles inputs that are always 0; their weights then have the lowest scores.
    """
    x = x.ldexp(-x.abs().max().frexp().exponent)  # the squares of 1e-30 would be zero
    hessian = (x.T @ x).double()
    damping = DAMPING * hessian.diagonal().mean()
    if damping == 0:
        raise SuiteError("spensegpt: expected calibration activations; found only zeros")
    hessian.diagonal().add_(damping)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper.to(x.dtype)


def _prune_block(transposed: Tensor, upper: Tensor, pattern: Pattern) -> Tensor:
    """Prune columns [b, n] in place; return their errors e [b, n], for the later columns."""
    errors = torch.zeros_like(transposed)
    diagonal = upper.diagonal()
    size = pattern.group or len(transposed)
    for start in range(0, len(transposed), size):
        group = slice(start, start + size)
        scores = (transposed[group] / diagonal[group, None]).abs().T
        by_row = pattern.group or pattern.block > 1
        pruned = ~pattern.mask(scores if by_row else scores.flatten()).view_as(scores).T
        for i, mask in enumerate(pruned, start):
            errors[i] = transposed[i].where(mask, 0) / diagonal[i]
            transposed[i].masked_fill_(mask, 0)
            transposed[i + 1 :].addr_(upper[i, i + 1 :], errors[i], alpha=-1)
    return errors
