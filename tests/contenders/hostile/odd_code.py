"""Is right; its digest of the machine code is an object."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    w, x = operands.weights["w"].to_dense(), operands.activations["x"]
    return Launch(lambda: x @ w.T, code=object())  # type: ignore[arg-type]


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)
