"""A decoding step of dense weights: four products per layer, each by its fastest call (_gemm.py).

_decoder.py draws the step. Gate and up are one product, and act is one more kernel. In fp8, the
kernels between the products write e4m3 with one scale per tensor. So a layer has ten launches in
any dtype, or nine if attention is in one part.
"""

from functools import partial

from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense import _decoder


def prepare(operands: Operands) -> Launch:
    return _decoder.prepare(operands, partial(_decoder.dense_part, operands))


KERNEL = Kernel("decoder", "dense", "cuda", prepare, _decoder.unsupported)
