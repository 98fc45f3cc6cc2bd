"""FlashAttention 4, dense and forward only. It does not read the mask.

A causal mask is aligned to the last key, as the op's is.
"""

from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers.fa4 import attention, unsupported_heads


def prepare(operands: Operands) -> Launch:
    """Raises Unsupported if flash_attn is an older version."""
    return attention(operands, causal=operands.problem["causal"])


KERNEL = Kernel("attention", "dense", "cuda", prepare, unsupported_heads)
