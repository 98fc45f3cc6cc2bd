"""Block masks of elements that a model computes in its forward pass.

    elements    [batch, lists, S_q, S_kv]    bool, or 0 and large negative numbers to add to scores

A traced forward pass has no values, so the operators of attention take the elements, and list the
blocks when they first see them (_attention_op.py). The mask is an attribute of the tensor, so all
layers of a model share its lists and plans. A write that torch counts makes a new one.
"""

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.torch_operator import torch_operator
from sparsebench.kernels.nn._stamp import StampedValue

ELEMENTS = "_sparsebench_elements"  # attribute of the tensor: its mask
HIDDEN = -9e3  # of a mask to add; transformers takes -1e4, -9984 in bf16, or the least number


@torch.inference_mode(False)  # torch counts no writes to tensors that are made in that mode
def mask_of_elements(elements: Tensor, block: int) -> BlockMask:
    """Return the mask of [batch, lists, S_q, S_kv]; the same one until the tensor is written.

    elements  bool; or floating point: 0 for what is allowed, and HIDDEN or less for the rest

    Raises Unsupported for other values.
    """
    counted = not elements.is_inference()
    stamp = (elements._version, elements.data_ptr(), block) if counted else None
    entry = elements.__dict__.get(ELEMENTS)
    if counted and isinstance(entry, StampedValue) and entry.stamp == stamp:
        stored: BlockMask = entry.value
        return stored
    allowed = elements
    if elements.dtype != torch.bool:
        allowed = elements == 0
        if not bool((allowed | (elements <= HIDDEN)).all()):
            expected = f"a mask of bool, or of 0 and numbers below {HIDDEN:g}"
            raise Unsupported(f"attention: expected {expected}, found a bias")
    mask = BlockMask.from_elements(allowed.contiguous(), block)
    if counted:
        setattr(elements, ELEMENTS, StampedValue(stamp, [], mask))
    return mask


@lru_cache(16)
@torch.inference_mode(False)
def whole_mask(
    tokens: tuple[int, int], block: int, batch: int, causal: bool, device: torch.device
) -> BlockMask:
    """Return the mask that allows every element, or every one of the causal rule."""
    rows, columns = (-(-size // block) for size in tokens)
    cells = torch.ones(batch * rows, columns, device=device)
    options: dict[str, Any] = {"block": block, "tokens": [*tokens], "batch": batch}
    return BlockMask.from_dense(cells, causal=causal, **options)


@torch.inference_mode(False)
def _counted_copy(elements: Tensor) -> Tensor:
    """Return a copy to which torch counts writes, also in torch.inference_mode."""
    return elements.clone(memory_format=torch.contiguous_format)


_like = partial(torch.empty_like, memory_format=torch.contiguous_format)
counted_copy = torch_operator("counted_copy", _counted_copy, _like)
