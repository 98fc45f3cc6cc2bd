"""Reads W as if it were stored [k, n]: right for symmetric matrices only."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    w, x = operands.weights["w"].to_dense(), operands.activations["x"]
    return Launch(lambda: x @ w.reshape(w.shape[1], w.shape[0]))


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)
