"""SpenseGPT: one pass of SparseGPT over the sparse columns, compensated in all that follow.

    H = X^T X + damping      U upper triangular with H^-1 = U^T U

    for every column i, from left to right:              columns   . . x . | B ────── | dense
        every 4: prune the 2 smallest (w_i / U_ii)²                done    i  lazily    last
        or every B: the smallest of all rows, wherever they are
        e = w_i / U_ii where w_i is pruned, else 0
        w_i: pruned elements are 0, and column i is never touched again
        w_j -= e U_ij for all j > i

The update compensates the error of a pruned element in the columns to its right. The dense columns
are last and never pruned, so they take up errors of all others. Updates beyond a block of B columns
are one product for each block. Rows do not depend on one another.

Sources: Frantar and Alistarh, arXiv 2301.00774, algorithm 1 (blocks of 128, damping of 1 % of the
mean diagonal; unstructured masks are of a block, all rows together); Lee et al., arXiv 2606.10445,
section 3.3 (dense columns last).
"""

import torch
from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.harness.models.pruning.pattern import TWO_FOUR, Pattern

BLOCK = 128
DAMPING = 0.01


def prune(weight: Tensor, x: Tensor, columns: int, pattern: Pattern = TWO_FOUR) -> Tensor:
    """Return the weight [n, k] with its first `columns` columns pruned, the others updated.

    x [tokens, k] are the inputs; with fewer tokens than inputs H says more of the sample than of
    the layer, which is a SuiteError. Both are fp32.
    """
    tokens, inputs = x.shape
    if tokens < inputs:
        expected = f"at least {inputs} calibration tokens, one an input"
        raise SuiteError(f"spensegpt: expected {expected}; found {tokens}")
    upper = _factor(x)
    # A column of the weight is a row here, so that each step reads and writes whole lines.
    turned = weight.T.clone(memory_format=torch.contiguous_format)
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        errors = _prune_block(turned[start:end], upper[start:end, start:end], pattern)
        turned[end:] -= upper[start:end, end:].T @ errors
    return turned.T.contiguous()


def _factor(x: Tensor) -> Tensor:
    """Return U [k, k]; factored in fp64, for H^-1 has the square of the inputs' condition number.

    Damping also gives an input that was always 0 a place in H: its weights are worth least.
    """
    hessian = (x.T @ x).double()
    damping = DAMPING * hessian.diagonal().mean()
    if damping == 0:
        raise SuiteError("spensegpt: expected calibration activations; found zeros alone")
    hessian.diagonal().add_(damping)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper.to(x.dtype)


def _prune_block(turned: Tensor, upper: Tensor, pattern: Pattern) -> Tensor:
    """Prune columns [b, n] in place, and return the errors e [b, n] that later ones must bear."""
    errors = torch.zeros_like(turned)
    diagonal = upper.diagonal()
    size = pattern.group or len(turned)
    for start in range(0, len(turned), size):
        group = slice(start, start + size)
        scores = (turned[group] / diagonal[group, None]).square().T
        pruned = ~pattern.kept(scores if pattern.group else scores.flatten()).view_as(scores).T
        for i, gone in enumerate(pruned, start):
            errors[i] = turned[i].where(gone, 0) / diagonal[i]
            turned[i].masked_fill_(gone, 0)
            turned[i + 1 :].addr_(upper[i, i + 1 :], errors[i], alpha=-1)
    return errors
