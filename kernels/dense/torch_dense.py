"""Dense baseline on the CPU: the op's definition in torch, in the problem's dtype.

Each product is one GEMM of oneDNN or MKL on all threads of torch. Depending on the CPU (AMX,
AVX512-BF16, SVE), 16-bit types run on matrix units or are converted to fp32.
"""

from sparsebench.kernels._kernel import Kernel
from sparsebench.kernels.dense import reference

KERNEL = Kernel(op="any", consumes="dense", device="cpu", prepare=reference.prepare)
