"""Sparse layers, and whole models made sparse: the public names.

    from sparsebench.nn import BlockSparse, sparsify_

    sparsify_(model, BlockSparse(block=64, sparsity=0.9))

If a program also imports transformers, before or after this module, `from_pretrained` restores
what `save_pretrained` wrote of a sparse model, and there is an attention implementation
"sparsebench".
"""

from sparsebench.harness.models import attention
from sparsebench.harness.models.after_import import after_import
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
    BlockSparseGatedMLP,
    BlockSparseLinear,
    CapturedStep,
    SparseGatedMLP,
    SpenseGatedMLP,
    SpenseLinear,
)

__all__ = [
    "BitmapLinear",
    "BlockSparse",
    "BlockSparseAttention",
    "BlockSparseGatedMLP",
    "BlockSparseLinear",
    "CapturedStep",
    "SparseActivations",
    "SparseGatedMLP",
    "SpenseGatedMLP",
    "SpenseLinear",
    "TwoFour",
    "Unstructured",
    "sparsify_",
]

after_import("transformers.modeling_utils", register)
after_import("transformers.modeling_utils", attention.register)
