"""Leaves the smallest 3.5 % of the weights that are not zero out."""

from sparsebench.kernels._kernel import OUTPUTS, Kernel, Launch, Operands

PART = 0.035


def prepare(operands: Operands) -> Launch:
    w, x = operands.weights["w"].to_dense().double(), operands.activations["x"]
    dtype = OUTPUTS[operands.problem["dtype"]]
    sizes = w[w != 0].abs().sort().values
    w = w.where(w.abs() > sizes[int(PART * len(sizes))], 0)
    return Launch(lambda: (x.double() @ w.T).to(dtype))


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)
