"""Prints to stdout, from Python and from below it, and is right."""

import os

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    w, x = operands.weights["w"].to_dense(), operands.activations["x"]
    print('{"rows": "are not printed here"}')
    os.write(1, b"nor here\n")
    return Launch(lambda: x @ w.T)


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)
