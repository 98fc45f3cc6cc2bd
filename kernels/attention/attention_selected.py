"""Attention whose blocks are selected in every launch: what a mask that changes costs.

    selects   pooled   means of Q and K, their products, the blocks, their lists, attention
              scores                                     the blocks, their lists, attention
              lists                                                  their lists, attention

`attention_wgmma` beside it has attention alone, so differences of the rows are the parts. A contest
compares outputs for one mask. So scores are added to a bias: 0 for the blocks of the mask, and -inf
for the rest. Every part does the work that it does without one (sparsebench.select_attention), and
it selects the mask, whatever the values of Q and K.

Bound: attention's, and the bytes of Q and K once more for their means.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.operator import Earlier, Engine, launch_of
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._kernel import Kernel, Launch, Operands, refuse
from sparsebench.kernels.attention import attention_triton, attention_wgmma
from sparsebench.kernels.attention._call import AttentionCall, bind, operator_of
from sparsebench.kernels.attention._selecting import means
from sparsebench.kernels.attention._shapes import unsupported
from sparsebench.kernels.attention._shared_plans import Sizes, make_shared_plans

ENGINES = attention_wgmma.KERNEL, attention_triton.KERNEL
Part = Literal["pooled", "scores", "lists"]


def prepare(operands: Operands, *, selects: Part = "pooled") -> Launch:
    """Choose the kernel of attention, and make plans that take any lists. Raises Unsupported."""
    parts = get_args(Part)
    expected = f"expected {', '.join(parts)}"
    refuse(None if selects in parts else f"selects: {expected}; found {selects!r}")
    mask, bound = operands.weights["mask"], bind(operands, ENGINES)
    assert isinstance(mask, BlockMask)
    call: AttentionCall = bound.call
    shape, lists = call.shape, mask.lists
    refuse("expected a mask without bits, found bits" if mask.bits is not None else None)
    if selects == "pooled" and lists > shape.kv_heads:
        refuse(f"expected a list for each of {shape.kv_heads} KV heads or fewer, found {lists}")

    cells = mask.to_dense().view(mask.batch, lists, mask.q_blocks, mask.kv_blocks)
    bias = torch.zeros_like(cells, dtype=torch.float32).masked_fill_(cells == 0, -torch.inf)
    most = max(1, int(mask.counts.max()))

    def select(scores: Tensor) -> BlockMask:
        block, tokens = [*mask.block], [*mask.tokens]
        return BlockMask.from_scores(scores, most, block=block, tokens=tokens, causal=mask.causal)

    selection = select(bias)

    def likeliest(call: AttentionCall) -> Sequence[Engine]:
        return [e for e in ENGINES if not e.unsupported(call.problem, operands.device)]

    plans = make_shared_plans(
        Sizes.of(selection), lambda first: operator_of(first, ENGINES, likeliest)
    )
    q, k, v = bound.activations

    def pooled(x: Tensor, block: int) -> Tensor:
        heads = x.view(shape.batch, -1, x.shape[1] // shape.head_dim, shape.head_dim)
        return means(heads, block, lists).flatten(0, 1)

    def scores() -> Tensor:
        products = pooled(q, mask.block[0]), pooled(k, mask.block[1]).mT
        return torch.baddbmm(bias.flatten(0, 1), *products).view_as(bias)

    def columns() -> Tensor:
        if selects == "lists":
            return selection.columns
        return select(scores() if selects == "pooled" else bias).columns

    def run(product: Product) -> Tensor:
        plans.load(columns(), transposed=False)
        o: Tensor = product.run(q, k, v)[0]
        return o

    plans.load(selection.columns, transposed=False)
    earlier = Earlier(operands.pinned, operands.timed)
    selected = plans.operator.select(call, lambda product: lambda: product.run(q, k, v), earlier)
    launch = launch_of(selected, lambda: run(selected.product))
    return replace(launch, choice={**launch.choice, "selects": selects})


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported)
"""Selects blocks, lists them, and attends to them."""
