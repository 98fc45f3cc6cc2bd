"""Is right while it is checked, and wrong once it is timed."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands

RIGHT_CALLS = 4


def prepare(operands: Operands) -> Launch:
    w, x = operands.weights["w"].to_dense(), operands.activations["x"]
    calls = 0

    def run() -> object:
        nonlocal calls
        calls += 1
        return x @ w.T if calls < RIGHT_CALLS else x @ w.T * 1.5

    return Launch(run)


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)
