"""Any stored format on a CPU, the plain way: decode the weights at every call, then multiply.

torch's operations read the stored arrays and build the dense matrix (`to_dense`), and the op's
definition runs on it. So the call takes at least as long as the dense product; it shows that the
format works on a machine without a GPU, and what decoding costs there.
"""

from sparsebench.kernels._kernel import Kernel, Launch, Operands, Output


def prepare(operands: Operands) -> Launch:
    def run() -> Output:
        weights = {name: weight.to_dense() for name, weight in operands.weights.items()}
        return operands.definition(**weights, **operands.activations)

    return Launch(run)


KERNEL = Kernel(op="linear", consumes="any", device="cpu", prepare=prepare)
