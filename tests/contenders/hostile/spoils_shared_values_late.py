"""Is right, and writes into the blocks that it shares from its third call on."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    w, x = operands.weights["w"], operands.activations["x"]
    values, dense, calls = w.arrays()["values"], w.to_dense().clone(), 0

    def run() -> object:
        nonlocal calls
        calls += 1
        if calls > 2:
            values.zero_()
        return x @ dense.T

    return Launch(run)


KERNEL = Kernel(op="linear", consumes="bsr", device="any", prepare=prepare)
