"""Sparse layers, and whole models made sparse: the public names.

    from sparsebench.nn import BlockSparse, sparsify_

    sparsify_(model, BlockSparse(block=64, sparsity=0.9))

Where transformers is installed, importing this module also lets `from_pretrained` restore what
`save_pretrained` wrote of a sparse model, and registers the attention implementation "sparsebench".
"""

from importlib.util import find_spec

from sparsebench.harness.models import attention
from sparsebench.harness.models.pruning.checkpoint import register
from sparsebench.harness.models.pruning.sparsify import (
    BlockSparse,
    SparseActivations,
    TwoFour,
    Unstructured,
    sparsify_,
)
from sparsebench.kernels.nn import (
    BitmapLinear,
    BlockSparseAttention,
    BlockSparseLinear,
    SparseGatedMLP,
    SpenseGatedMLP,
    SpenseLinear,
)

__all__ = [
    "BitmapLinear",
    "BlockSparse",
    "BlockSparseAttention",
    "BlockSparseLinear",
    "SparseActivations",
    "SparseGatedMLP",
    "SpenseGatedMLP",
    "SpenseLinear",
    "TwoFour",
    "Unstructured",
    "sparsify_",
]

if find_spec("transformers"):
    register()
    attention.register()
