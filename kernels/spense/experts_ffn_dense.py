"""The gated layer of a mixture with dense experts, as experts_ffn_wgmma computes it."""

from sparsebench.formats.spense import Spense
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.spense import experts_ffn_wgmma, experts_wgmma


def prepare(operands: Operands) -> Launch:
    """Store the weights in dense tiles, and plan. Raises Unsupported."""
    weights = (
        Spense.from_dense(operands.weights[name].to_dense(), dense_fraction=1.0, split="columns")
        for name in ("wg", "wu", "wd")
    )
    return experts_ffn_wgmma.launch_of(operands, *weights)


KERNEL = Kernel("experts_ffn", "dense", "cuda", prepare, experts_wgmma.unsupported)
