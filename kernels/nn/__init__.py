"""Layers to train with, and to run pruned models with: drop-ins for nn.Linear and gated MLPs."""

from sparsebench.kernels.nn import _flops as _flops
from sparsebench.kernels.nn.bitmap import BitmapLinear as BitmapLinear
from sparsebench.kernels.nn.block_sparse_mlp import BlockSparseGatedMLP as BlockSparseGatedMLP
from sparsebench.kernels.nn.experts import SparseExperts as SparseExperts
from sparsebench.kernels.nn.linear import BlockSparseLinear as BlockSparseLinear
from sparsebench.kernels.nn.sparse_gated_mlp import SparseGatedMLP as SparseGatedMLP
from sparsebench.kernels.nn.spense import SpenseGatedMLP as SpenseGatedMLP
from sparsebench.kernels.nn.spense import SpenseLinear as SpenseLinear
