"""A decoding step of block-sparse weights: bsr_wgmma, bsr_small or bsr_triton for each product.

kernels/dense/_decoder.py draws the step and has the rest: norms, attention, the head, and, if only
the MLP is pruned (the problem's `pruned`), dense projections by their fastest call. Gate and up are
one product, and act is one more kernel, as in bsr_ffn.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.elementwise import hidden
from sparsebench.kernels._common.tuned_table import Tuned
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.bsr import bsr_ffn
from sparsebench.kernels.dense import _decoder
from sparsebench.kernels.dense._decoder import WEIGHTS, Part, copy_of, dense_part, is_pruned
from sparsebench.results.record import Problem


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    """Choose a kernel for each product; `tuned` is passed on to it. Raises Unsupported."""
    return _decoder.prepare(operands, partial(_part, operands, tuned))


def _part(operands: Operands, tuned: Tuned, name: str, inputs: Sequence[Tensor]) -> Part:
    if not is_pruned(operands.problem, name):
        return dense_part(operands, name, inputs)
    if name != "mlp":
        return _product(operands, name, bsr_ffn.weight_of(operands, WEIGHTS[name]), inputs, tuned)
    both = bsr_ffn.stacked(bsr_ffn.weight_of(operands, "wg"), bsr_ffn.weight_of(operands, "wu"))
    products = _product(operands, "gate_up", both, inputs, tuned)
    between = [hidden(y, operands.problem["activation"]) for y in products.outs]
    gated = _decoder.append_kernels(products, between)
    wd, inputs = bsr_ffn.weight_of(operands, "wd"), _decoder.run_once(gated).outs
    down = _product(operands, "down", wd, inputs, tuned)
    return _decoder.join(gated, down)


def _product(operands: Operands, name: str, w: Bsr, inputs: Sequence[Tensor], tuned: Tuned) -> Part:
    """Search for the first layer; the others take its choice, each with a copy of the weights."""
    first = bsr_ffn.fastest(operands, name, w, inputs[0], tuned)
    with_choice = replace(operands, pinned={name: first.choice})
    rest = [bsr_ffn.fastest(with_choice, name, copy_of(w), x, tuned) for x in inputs[1:]]
    outs = [bsr_ffn.output_of(launch) for launch in (first, *rest)]
    return Part([first, *rest], outs, {name: first.choice}, first.candidates, first.code)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] == "fp8":
        return "expected fp16, bf16 or fp32, found fp8"
    return _decoder.unsupported_pruned(problem, device)


KERNEL = Kernel("decoder", "bsr", "cuda", prepare, unsupported)
