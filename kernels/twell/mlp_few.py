"""Feed-forward layer without a gate for up to 64 tokens, few active units: one launch.

    U = X @ Wu.T           Y = act(U) @ Wd.T           act is relu or relu2

The kernel is ffn_few.cu with U in place of the gate. It reads all of Wu, and rows of Wd once.
"""

from dataclasses import replace

from sparsebench.kernels.twell import ffn_few

KERNEL = replace(ffn_few.KERNEL, op="mlp")
