"""Is wrong in one call of fifty."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    w, x = operands.weights["w"].to_dense(), operands.activations["x"]
    calls = 0

    def run() -> object:
        nonlocal calls
        calls += 1
        return x @ w.T * (1.1 if calls % 50 == 0 else 1)

    return Launch(run)


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)
