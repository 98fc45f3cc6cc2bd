"""Returns the right product where the weight has no block."""

from dataclasses import replace

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    dy, x, w = operands.activations["dy"], operands.activations["x"], operands.pattern
    columns = w.columns.flip(0)
    return Launch(lambda: replace(w, columns=columns).sample(dy.t() @ x))


KERNEL = Kernel(op="linear_wgrad", consumes="bsr", device="any", prepare=prepare)
