"""The mask, and lists in the block size of a library, for the peers of attention."""

import torch

from sparsebench.errors import Unsupported
from sparsebench.formats._format import sides_of
from sparsebench.formats.block_mask import BlockMask
from sparsebench.formats.block_mask_converters import PaddedLists, padded_lists
from sparsebench.kernels._kernel import Operands
from sparsebench.results.record import Problem


def mask_of(operands: Operands) -> BlockMask:
    mask = operands.weights["mask"]
    assert isinstance(mask, BlockMask)
    return mask


def cut(mask: BlockMask, side: int) -> BlockMask:
    """Return the same mask in blocks of `side`, which divides its blocks: all are full."""
    cells = mask.to_dense().view(mask.batch * mask.lists, mask.q_blocks, mask.kv_blocks)
    for dim, (outer, count) in enumerate(zip(mask.block, mask.tokens, strict=True), 1):
        cells = cells.repeat_interleave(outer // side, dim).narrow(dim, 0, -(-count // side))
    tokens = [*mask.tokens]
    return BlockMask.from_dense(cells.flatten(0, 1), block=side, tokens=tokens, batch=mask.batch)


def lists_in(mask: BlockMask, heads: int, side: int) -> PaddedLists:
    """Return padded lists of full blocks of `side`, for each head."""
    return padded_lists(cut(mask, side), heads, partial=False)


def selected_lists(mask: BlockMask) -> PaddedLists:
    """Return what a selection gives a library: the blocks of each list, partial ones too.

    Columns ascend, and have a place for every block of keys, of which the first `count` are valid.
    """
    if mask.bits is not None:
        raise Unsupported("expected partial blocks of the causal rule, found bits")
    cells = mask.to_dense().bool().view(mask.batch, mask.lists, mask.q_blocks, mask.kv_blocks)
    columns = cells.int().argsort(dim=-1, descending=True, stable=True)
    return PaddedLists(cells.sum(-1, dtype=torch.int32), columns.int())


def require_keys(mask: BlockMask) -> None:
    """Raise Unsupported if a block of queries has no block of keys."""
    if not bool(torch.diff(mask.offsets).all()):
        raise Unsupported("expected a block of keys for every query, found queries without one")


def unsupported_blocks(problem: Problem, side: int) -> str | None:
    if any(length % side for length in sides_of(problem["block"])):
        return f"block: expected a multiple of {side}, found {problem['block']}"
    tokens = problem["m"], problem["context"] or problem["m"]
    if any(size % side for size in tokens):
        return f"expected tokens as a multiple of {side}, found {tokens[0]} and {tokens[1]}"
    return unsupported_causal(problem)


def unsupported_causal(problem: Problem) -> str | None:
    return "expected a mask that is not causal, found a causal one" if problem["causal"] else None
