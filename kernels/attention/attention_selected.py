"""Attention whose blocks are selected in every launch: what a mask that changes costs.

    selects   pooled   means of Q and K, their products, the blocks, their lists, attention
              nsa      means of K and V, their branch and the scores of NSA, the same    (_nsa.py)
              moba     means of K, the scores of MoBA, the same                         (_moba.py)
              scores                                     the blocks, their lists, attention
              lists                                                  their lists, attention

`attention_wgmma` or `attention_gathered` beside it has attention alone, so differences of the rows
are the parts. O is that of the selected blocks: gates and other branches are not in it. A contest
compares outputs for one mask. So scores are added to a bias: 0 for the blocks of the mask, and -inf
for the rest. Every part does the work that it does without one (sparsebench.select_attention), and
it selects the mask, whatever the values of Q and K.

Bound: attention's, and the bytes of Q and K once more for their means and scores.
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
from sparsebench.kernels.attention import attention_gathered, attention_triton, attention_wgmma
from sparsebench.kernels.attention._call import AttentionCall, bind, operator_of
from sparsebench.kernels.attention._moba import gate
from sparsebench.kernels.attention._nsa import compress
from sparsebench.kernels.attention._selecting import means
from sparsebench.kernels.attention._shapes import AttentionShape, by_head, unsupported
from sparsebench.kernels.attention._shared_plans import Sizes, make_shared_plans

ENGINES = attention_gathered.KERNEL, attention_wgmma.KERNEL, attention_triton.KERNEL
Part = Literal["pooled", "nsa", "moba", "scores", "lists"]


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
    refuse(unsupported_lists(selects, mask, shape))

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
        if selects == "nsa":
            of_q, of_k, of_v = (by_head(x, shape) for x in (q, k, v))
            return compress(of_q, of_k, of_v, mask.block[1], call.scale, bias)[1]
        if selects == "moba":
            return gate(by_head(q, shape), by_head(k, shape), mask.block[1], bias)
        products = pooled(q, mask.block[0]), pooled(k, mask.block[1]).mT
        return torch.baddbmm(bias.flatten(0, 1), *products).view_as(bias)

    def columns() -> Tensor:
        if selects == "lists":
            return selection.columns
        return select(bias if selects == "scores" else scores()).columns

    def run(product: Product) -> Tensor:
        plans.load(columns(), transposed=False)
        o: Tensor = product.run(q, k, v)[0]
        return o

    plans.load(selection.columns, transposed=False)
    earlier = Earlier(operands.pinned, operands.timed)
    selected = plans.operator.select(call, lambda product: lambda: product.run(q, k, v), earlier)
    launch = launch_of(selected, lambda: run(selected.product))
    return replace(launch, choice={**launch.choice, "selects": selects})


def unsupported_lists(selects: Part, mask: BlockMask, shape: AttentionShape) -> str | None:
    """Return why a way to select has other lists than a mask, or None."""
    if selects == "pooled" and mask.lists > shape.kv_heads:
        return f"expected a list for each of {shape.kv_heads} KV heads or fewer, found {mask.lists}"
    if selects in ("nsa", "moba"):
        lists = shape.kv_heads if selects == "nsa" else shape.heads
        if mask.lists != lists or mask.block[0] != 1 or not mask.causal:
            expected = f"{selects}: expected a causal mask with {lists} lists of each query"
            return f"{expected}, found {mask.lists} of {mask.block[0]}"
    return None


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported)
"""Selects blocks, lists them, and attends to them."""
