"""Choose the elements of a weight to keep, and prune by magnitude, by Wanda or by SpenseGPT.

    columns          0 1 2 3   4 5 6 7   |   8 9 10 11        keep(weight, scores, columns=8, ...)
    2:4              x . x .   . x x .   |   x x x  x         group 4: 2 of every aligned 4
    6:8              x . x x   x x x .   |   x x x  x         group 8: 6 of every aligned 8
    0.5              x x x .   . . x .   |   x x x  x         group 0: half of the row's 8
    4x4:0.5          x x x x   . . . .   |   x x x  x         blocks of 4 rows and 4 columns

The remaining columns are the dense region of a weight that is split by columns. Without blocks,
every row keeps equally many elements: this loses less accuracy than a threshold that rows share
(Sun et al., arXiv 2306.11695, section 5), and balances the load of a kernel. Blocks compete over
the whole weight, by the sum of the squares of their scores: for scores of magnitude that is the
Euclidean norm, by which BlockSparse (sparsify.py) chooses.

SpenseGPT is one pass of SparseGPT over the sparse columns, compensated in all later columns:

    H = X^T X + damping      U upper triangular with H^-1 = U^T U

    for every column i, from left to right:              columns   . . x . | B ────── | dense
        every 4: prune the 2 smallest (w_i / U_ii)²                done    i  lazily    last
        or every B: the smallest of all rows, or blocks, together
        e = w_i / U_ii if w_i is pruned, else 0
        set the pruned elements of w_i to 0; column i is then final
        w_j -= e U_ij for all j > i

The dense columns are last and never pruned, so they compensate errors of all others. Updates beyond
a block of B columns are one product per block. Rows are independent of each other.

Sources: Frantar and Alistarh, arXiv 2301.00774, algorithm 1 (blocks of 128, damping of 1 % of the
mean diagonal; an unstructured mask covers all rows of a block); Lee et al., arXiv 2606.10445,
section 3.3 (dense columns last).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from sparsebench.errors import SuiteError

FORMS = "N:M such as 2:4, a fraction such as 0.5, or blocks such as 64x64:0.8"
BLOCK, DAMPING = 128, 0.01  # settings of SpenseGPT


@dataclass(frozen=True)
class PruningPattern:
    """Prune a fraction of the elements.

    name      N:M, unstructured, or the size of the blocks
    sparsity  fraction to prune, above 0 and below 1
    group     each group of this many columns loses this fraction; 0 for the whole row
    block     side of the square blocks that are kept or pruned as a whole; 1 for single elements
    """

    name: str
    sparsity: float
    group: int = 0
    block: int = 1

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse `2:4`, `0.5` or `64x64:0.8`. Raises SuiteError."""
        shape, _, rest = text.rpartition(":")
        message = f"pattern: expected {FORMS}; found {text!r}"
        try:
            if shape.isdecimal():
                pattern = cls(text, 1 - int(shape) / int(rest), int(rest))
            elif sides := re.fullmatch(r"(\d+)x\1", shape):
                pattern = cls(shape, float(rest), block=int(sides[1]))
            else:
                pattern = cls("unstructured", float(text))
        except (ValueError, ZeroDivisionError) as error:
            raise SuiteError(message) from error
        if not 0 < pattern.sparsity < 1 or pattern.block < 1:
            raise SuiteError(message)
        return pattern

    @property
    def unit(self) -> int:
        """Return the number of columns that are pruned together; 1 if any number can be."""
        return self.group or self.block

    def mask(self, scores: Tensor) -> Tensor:
        """Return a mask [..., columns] of the highest scores; for blocks, scores are [n, columns].

        Among equal scores the first are kept. Raises SuiteError if none would stay, or if the
        groups or blocks do not divide the scores.
        """
        if self.block > 1:
            return self._block_mask(scores)
        size = self.group or scores.shape[-1]
        if size and scores.shape[-1] % size:
            raise SuiteError(f"pattern: expected a multiple of {size}, found {scores.shape[-1]}")
        return self._highest(scores.unflatten(-1, (-1, size))).flatten(-2)

    def _block_mask(self, scores: Tensor) -> Tensor:
        n, k = scores.shape
        if n % self.block or k % self.block:
            raise SuiteError(f"pattern: expected multiples of {self.block}, found {n}x{k}")
        relative = scores / scores.amax().clamp_min(torch.finfo(scores.dtype).tiny)
        means = avg_pool2d(relative.square()[None], self.block)[0]
        stay = self._highest(means.flatten()).view_as(means)
        return stay.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)

    def _highest(self, scores: Tensor) -> Tensor:
        """Return a mask of the highest scores [..., size] along the last axis."""
        size = scores.shape[-1]
        order = scores.argsort(dim=-1, descending=True, stable=True)
        stay = size - round(self.sparsity * size)
        if size and not stay:
            expected = f"a part of every {size} to stay at sparsity {self.sparsity:g}"
            raise SuiteError(f"pattern: expected {expected}, found none")
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :stay], True)


TWO_FOUR = PruningPattern.of("2:4")


def keep(
    weight: Tensor, scores: Tensor, columns: int, pattern: PruningPattern = TWO_FOUR
) -> Tensor:
    """Prune the first `columns` columns of a weight [n, k] by scores [n, k]."""
    if not columns:
        return weight.clone()
    sparse = weight[:, :columns].where(pattern.mask(scores[:, :columns]), 0)
    return torch.cat((sparse, weight[:, columns:]), dim=1)


def input_norms(x: Tensor) -> Tensor:
    """Return the norm of each input of x [tokens, k]; in fp32, squares of 1e-30 would be zero."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=0, dtype=torch.float64)
    return norms.to(x.dtype)


def magnitude(
    weight: Tensor, x: Tensor, columns: int, pattern: PruningPattern = TWO_FOUR
) -> Tensor:
    """Keep the largest |w_ij| of a weight [n, k]; the inputs x [tokens, k] are not used."""
    return keep(weight, weight.abs(), columns, pattern)


def wanda(weight: Tensor, x: Tensor, columns: int, pattern: PruningPattern = TWO_FOUR) -> Tensor:
    """Keep the largest |w_ij| ||x_j||, with the norm of input j over the tokens of x [tokens, k].

    Source: Sun et al., arXiv 2306.11695, section 3.
    """
    return keep(weight, weight.abs() * input_norms(x), columns, pattern)


def spensegpt(
    weight: Tensor, x: Tensor, columns: int, pattern: PruningPattern = TWO_FOUR
) -> Tensor:
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


def _prune_block(transposed: Tensor, upper: Tensor, pattern: PruningPattern) -> Tensor:
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


Prune = Callable[[Tensor, Tensor, int, PruningPattern], Tensor]
METHODS: dict[str, Prune] = {"magnitude": magnitude, "wanda": wanda, "spensegpt": spensegpt}
