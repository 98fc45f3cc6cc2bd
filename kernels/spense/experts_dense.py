"""Products of routed rows with dense experts by the kernel for 2:4 ones, whose tiles are all dense.

It shows how much of a gain is that of the sparsity and not that of the schedule: the same work
list, the same pipelines, and weights that are stored in the order of the tensor cores as well.
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
