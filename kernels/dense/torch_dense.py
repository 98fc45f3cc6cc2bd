"""Dense baseline on the CPU: the op's definition in torch, in the problem's dtype.

One oneDNN or MKL GEMM for each product, on as many threads as torch is given; whether the 16-bit
types run on matrix units or are converted to fp32 depends on the CPU (AMX, AVX512-BF16, SVE).
"""

from sparsebench.kernels._kernel import Kernel
from sparsebench.kernels.dense import reference

KERNEL = Kernel(op="any", consumes="dense", device="cpu", prepare=reference.prepare)
