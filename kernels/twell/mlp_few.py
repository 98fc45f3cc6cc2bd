"""Feed-forward layer without a gate for up to 64 tokens, few units on: one launch of ffn_few.cu.

    U = X @ Wu.T           Y = act(U) @ Wd.T           act is relu or relu2

All as in ffn_few.py, with U in the place of the gate: Wu is read whole, and rows of Wd once.
"""

from sparsebench.kernels._kernel import Kernel
from sparsebench.kernels.twell.ffn_few import prepare, unsupported

KERNEL = Kernel("mlp", "cvse", "cuda", prepare, unsupported)
