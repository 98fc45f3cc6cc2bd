"""The op's own definition in torch, on weights converted back to dense.

It runs any op, format and device in the problem's dtype. It decodes in `prepare` and multiplies
every zero, so it tests whether a format stores the right matrix, not whether the format is fast.
"""

from sparsebench.kernels._kernel import Kernel, Launch, Operands, Output


def prepare(operands: Operands) -> Launch:
    weights = {name: weight.to_dense() for name, weight in operands.weights.items()}
    arguments = {**weights, **operands.activations}
    pattern = operands.pattern

    def run() -> Output:
        dense = operands.definition(**arguments)
        return pattern.sample(dense) if pattern else dense

    return Launch(run)


KERNEL = Kernel(op="any", consumes="any", device="any", prepare=prepare)
