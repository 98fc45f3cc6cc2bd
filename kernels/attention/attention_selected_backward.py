"""Gradients of attention whose blocks are selected in every step: what a mask that changes costs.

    columns of the step ──> lists ──> transposed lists ──> dQ, dK, dV       a launch of this kernel
                            `lists`                        `attention`      its parts, each alone

The backward pass of a training step scores and selects nothing: autograd keeps the columns that the
forward pass selected, and the choice of blocks has no gradient. But it lists these columns again.
All layers of equal sizes share their plans (_shared_plans.py), so the lists that a layer's forward
pass wrote are those of the last layer by then. So a backward call of `sparsebench.select_attention`
(nn/_attention_op.py) makes two launches that write the lists for dQ and the transposed lists for dK
and dV, and then runs a plan that takes any lists. This kernel makes the same launches. A step takes
as long as it and attention_selected together. If a method reorders tokens or adds to the output
(vsa), the gradients of that come on top.

The kernel of a fixed mask, such as attention_wgmma_backward, is ahead in three ways. It has its
lists before it is timed. It starts the longest lists first, and needs no mask in full blocks. It
may store dS, whose memory depends on how many blocks there are.

Bound: that of the gradients, and the lists. Each of the two launches reads the columns once for
each 32 blocks of keys: 0.2 MB eight times at 16,384 tokens, 8 lists, blocks of 64, 10 % kept.
"""

from dataclasses import replace
from functools import partial

from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.operator import launch_of
from sparsebench.kernels._common.search import lines_of_parts
from sparsebench.kernels._kernel import Kernel, Launch, Operands, Output
from sparsebench.kernels.attention import (
    attention_gathered_backward,
    attention_triton_backward,
    attention_wgmma_backward,
)
from sparsebench.kernels.attention._call import bind
from sparsebench.kernels.attention._shapes import unsupported
from sparsebench.kernels.attention.attention_selected import choose, plans_of, selection_of

ENGINES = (
    attention_gathered_backward.KERNEL,
    attention_wgmma_backward.KERNEL,
    attention_triton_backward.KERNEL,
)


def prepare(operands: Operands) -> Launch:
    """Choose the kernel of gradients, and make plans that take any lists. Raises Unsupported."""
    mask, bound = operands.weights["mask"], bind(operands, ENGINES)
    assert isinstance(mask, BlockMask)
    bias, select = selection_of(mask, mask.lists)
    selection = select(bias)
    plans = plans_of(selection, ENGINES)
    load = partial(plans.load, selection.columns, transposed=True)
    load()
    selected = choose(plans, bound, operands)
    differentiate = bound.run(selected.product)

    def run() -> Output:
        load()
        return differentiate()

    launch = launch_of(selected, run)
    parts = lines_of_parts({"lists": load, "attention": differentiate}, operands.device)
    return replace(launch, candidates=[*launch.candidates, *parts])


KERNEL = Kernel("attention_backward", "block_mask", "cuda", prepare, unsupported)
"""Lists the selected blocks, and those of the transpose, and computes dQ, dK and dV."""
