"""Transposes every block: right for symmetric products only."""

from dataclasses import replace

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    dy, x, w = operands.activations["dy"], operands.activations["x"], operands.pattern

    def run() -> object:
        gradient = w.sample(dy.t() @ x)
        return replace(gradient, values=gradient.values.transpose(1, 2).contiguous())

    return Launch(run)


KERNEL = Kernel(op="linear_wgrad", consumes="bsr", device="any", prepare=prepare)
