"""Right kernels, and one that leaves something out, for tests of guests."""

import os

from declare import kernel, run_linear, run_wgrad, weight_and_input
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands


@run_linear
def right(w: Tensor, x: Tensor) -> object:
    """Multiply."""
    return x @ w.T


@run_wgrad
def gradient(dy: Tensor, x: Tensor, w: Bsr) -> object:
    """Return the gradient at the pattern of W."""
    return w.sample(dy.T @ x)


class Smaller(Bsr):
    """A pattern that says nothing of its first block."""

    def sample(self, dense: Tensor) -> Bsr:
        """Return the values, of which those of the first block are padding."""
        packed = super().sample(dense)
        packed.arrays()["values"][0].zero_()
        return packed


def prepare(operands: Operands) -> Launch:
    """Replace the pattern's class."""
    object.__setattr__(operands.pattern, "__class__", Smaller)
    dy, x, w = operands.activations["dy"], operands.activations["x"], operands.pattern
    return Launch(lambda: w.sample(dy.T @ x))


leaves_out_a_block: Kernel = kernel(op="linear_wgrad", consumes="bsr")(prepare)


@kernel()
def choosing(operands: Operands) -> Launch:
    """Choose a number at random unless it is pinned."""
    w, x = weight_and_input(operands)
    choice = operands.pinned or {"draw": int.from_bytes(os.urandom(4), "little")}
    return Launch(lambda: x @ w.T, choice)
