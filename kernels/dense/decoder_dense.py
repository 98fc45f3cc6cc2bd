"""A decoding step of dense weights: four products a layer, each by its fastest way (cublas.py).

_decoder.py draws the step. Gate and up are one product; act is one more kernel. In fp8 the kernels
between the products write e4m3 at a scale a tensor, so that a layer has ten launches in any dtype,
nine where attention is in one part.
"""

from functools import partial

import torch

from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense import _decoder
from sparsebench.results.record import Problem


def prepare(operands: Operands) -> Launch:
    """Choose the fastest way of each product. Raises Unsupported."""
    return _decoder.prepare(operands, partial(_decoder.dense_part, operands))


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Say why the step cannot run here, or None."""
    return _decoder.unsupported(problem, device) or _decoder.unsupported_size(problem, device)


KERNEL = Kernel("decoder", "dense", "cuda", prepare, unsupported)
