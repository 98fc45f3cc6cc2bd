"""Rounds W to 8-bit integers, with a scale for each output feature."""

from sparsebench.kernels._kernel import OUTPUTS, Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    w, x = operands.weights["w"].to_dense().double(), operands.activations["x"]
    dtype = OUTPUTS[operands.problem["dtype"]]
    scale = w.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    w = (w / scale).round() * scale
    return Launch(lambda: (x.double() @ w.T).to(dtype))


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)
