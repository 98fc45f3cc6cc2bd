"""Keeps the gradient of non-zeros alone: a block is stored whole, and so is its gradient."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    dy, x, w = operands.activations["dy"], operands.activations["x"], operands.pattern

    kept = w.values != 0
    kept[:, 0] = False

    def run() -> object:
        gradient = w.sample(dy.t() @ x)
        gradient.values.mul_(kept)
        return gradient

    return Launch(run)


KERNEL = Kernel(op="linear_wgrad", consumes="bsr", device="any", prepare=prepare)
