"""Misses a token in one element of one block."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    dy, x, w = operands.activations["dy"], operands.activations["x"], operands.pattern

    def run() -> object:
        gradient = w.sample(dy.t() @ x)
        gradient.values[0, 2, 1] = 0
        return gradient

    return Launch(run)


KERNEL = Kernel(op="linear_wgrad", consumes="bsr", device="any", prepare=prepare)
