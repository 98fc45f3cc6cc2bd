"""Products of routed rows with dense experts, Y_e = X_e @ W_e.T, by the kernel for 2:4 ones.

    W   [experts n, k] in dense tiles only (formats/spense.py); experts_wgmma.py has the rest

The work list, the pipelines and the order of the weights are those of 2:4 experts. So what
experts_wgmma gains over this kernel comes from sparsity, and not from the schedule.
"""

from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.engines import gpu_engine
from sparsebench.kernels._common.operator import Engine, OperatorCall
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.spense import experts_wgmma as kernel

NAME = "experts_dense"


def bind(operands: Operands, engines: tuple[Engine, ...]) -> OperatorCall:
    """Return the call of a suite's operands, whose weight is stored in dense tiles."""
    dense = operands.weights["w"].to_dense()
    w = Spense.from_dense(dense, dense_fraction=1.0, split="columns")
    return kernel.bind_tiles(w, operands, engines)


KERNEL = gpu_engine(
    *(NAME, "experts", "dense", kernel.ExpertsConfig, kernel.choices, kernel.plan),
    *(kernel.unsupported, bind, kernel.unsupported_call),
)
