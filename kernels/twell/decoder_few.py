"""A decoding step of dense weights whose MLPs have few active units: ffn_few.cu in each layer.

kernels/dense/_decoder.py draws the step and has the rest: norms, attention, and the fastest dense
projections and head. Each MLP is one launch. It reads all of Wg, and the rows of Wu and Wd of units
that are active for any sequence, and writes what the layer adds to the residual stream.

    sequences   up to 64, one token each
    weights     16 bits; each layer has its own Wg, Wu and Wd.T
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sparsebench.kernels._common.operator import NoConfig
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense import _decoder
from sparsebench.kernels.dense._decoder import DecoderPart, dense_part
from sparsebench.kernels.twell import ffn_few
from sparsebench.kernels.twell._call import MOST_K, TwellCall
from sparsebench.results.record import Problem


def prepare(operands: Operands) -> Launch:
    """Choose the fastest call of each dense product. Raises Unsupported."""
    return _decoder.prepare(operands, partial(_part, operands))


def _part(operands: Operands, name: str, inputs: Sequence[Tensor]) -> DecoderPart:
    if name != "mlp":
        return dense_part(operands, name, inputs)
    wg, wu, wd = (operands.weights[weight].to_dense() for weight in ("wg", "wu", "wd"))
    wd_t, y = wd.t().contiguous(), torch.empty_like(inputs[0])
    squared, (n, k) = operands.problem["activation"] == "relu2", wg.shape
    call = TwellCall(len(y), n, k, wg.dtype, squared)
    product = ffn_few.KERNEL.plan(y.device, call, NoConfig())
    calls = [partial(product.run, x, *(w.clone() for w in (wg, wu, wd_t)), out=y) for x in inputs]
    return DecoderPart(calls, [y] * len(inputs), {}, code=product.code)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the step cannot run on the device, or None."""
    if problem["hidden"] > MOST_K:
        return f"expected hidden up to {MOST_K}, found {problem['hidden']}"
    sizes = {"n": problem["intermediate"], "k": problem["hidden"]}
    layer = Problem("ffn", {**problem.fields, **sizes})
    return (
        unsupported_on_hopper(problem, device)
        or ffn_few.unsupported(layer, device)
        or _decoder.unsupported(problem, device)
    )


KERNEL = Kernel("decoder", "cvse", "cuda", prepare, unsupported)
