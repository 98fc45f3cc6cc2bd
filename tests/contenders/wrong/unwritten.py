"""Leaves the last row of its output as it finds it."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    w, x = operands.weights["w"].to_dense(), operands.activations["x"]
    out = x @ w.T

    def run() -> object:
        out[:-1] = x[:-1] @ w.T
        return out

    return Launch(run)


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)
