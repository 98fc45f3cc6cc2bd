"""Sparse layers, and whole models made sparse: the public names.

    from sparsebench.nn import BlockSparse, sparsify_

    sparsify_(model, BlockSparse(block=64, sparsity=0.9))

If a program also imports transformers, before or after this module, `from_pretrained` restores
what `save_pretrained` wrote of a sparse model, and there is an attention implementation
"sparsebench".
"""

from typing import Any

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
    BlockSparseGatedMLP,
    BlockSparseLinear,
    SparseExperts,
    SparseGatedMLP,
    SpenseGatedMLP,
    SpenseLinear,
)

__all__ = [
    "BitmapLinear",
    "BlockSparse",
    "BlockSparseGatedMLP",
    "BlockSparseLinear",
    "SparseActivations",
    "SparseExperts",
    "SparseGatedMLP",
    "SpenseGatedMLP",
    "SpenseLinear",
    "TwoFour",
    "Unstructured",
    "sparsify_",
]

GONE = {
    "BlockSparseAttention": "use nn.Linear around sparsebench.attention",
    "CapturedStep": "capture the step by torch.cuda.graph after two eager steps",
}


def __getattr__(name: str) -> Any:
    """Say what replaces a name of an earlier version. Raises ImportError, AttributeError."""
    if name in GONE:
        raise ImportError(f"sparsebench.nn.{name} is gone since 0.4: {GONE[name]}")
    raise AttributeError(f"module 'sparsebench.nn' has no attribute {name!r}")


after_import("transformers.modeling_utils", register)
after_import("transformers.modeling_utils", attention.register)
