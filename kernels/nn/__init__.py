"""What people train with, BlockSparseLinear, and run pruned models with: drop-ins for nn.Linear."""

from sparsebench.kernels.nn.linear import BlockSparseLinear as BlockSparseLinear
from sparsebench.kernels.nn.spense import SpenseGatedMLP as SpenseGatedMLP
from sparsebench.kernels.nn.spense import SpenseLinear as SpenseLinear
