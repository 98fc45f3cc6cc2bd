"""A decoding step of a mixture with dense weights, whose experts are torch's grouped products.

The step is that of decoder_dense.py. Its experts run as in experts_ffn_grouped.py, which is what
transformers runs, and one more launch copies their sums to a fixed buffer. A router has chosen the
experts.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense import _decoder
from sparsebench.kernels.dense._decoder import DecoderPart
from sparsebench.kernels.dense.experts_ffn_grouped import layer_of
from sparsebench.results.record import Problem


def prepare(operands: Operands) -> Launch:
    return _decoder.prepare(operands, partial(_part, operands))


def _part(operands: Operands, name: str, inputs: Sequence[Tensor]) -> DecoderPart:
    if name != "mlp":
        return _decoder.dense_part(operands, name, inputs)
    layers = [layer_of(operands) for _ in inputs]
    return _decoder.experts_part(operands, inputs, layers, {"experts": {"kernel": "torch"}})


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] != "bf16":  # torch loops over the experts of others, on the host
        return f"expected bf16, found {problem['dtype']}"
    return _decoder.unsupported(problem, device)


KERNEL = Kernel("experts_decoder", "dense", "cuda", prepare, unsupported)
