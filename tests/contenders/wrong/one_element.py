"""Misses one product in one element of the output."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    w, x = operands.weights["w"].to_dense(), operands.activations["x"]
    kept = int(w[1].abs().argmax())

    def run() -> object:
        out = x @ w.T
        out[2, 1] -= x[2, kept] * w[1, kept]
        return out

    return Launch(run)


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)
