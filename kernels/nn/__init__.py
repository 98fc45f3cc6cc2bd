"""What people train with: BlockSparseLinear, a drop-in for nn.Linear."""

from sparsebench.kernels.nn.linear import BlockSparseLinear as BlockSparseLinear
