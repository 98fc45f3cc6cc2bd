"""Every output is 0.7 % too large."""

from sparsebench.kernels._kernel import OUTPUTS, Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    w, x = operands.weights["w"].to_dense().double(), operands.activations["x"]
    dtype = OUTPUTS[operands.problem["dtype"]]
    return Launch(lambda: (x.double() @ w.T * 1.007).to(dtype))


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)
